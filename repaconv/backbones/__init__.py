"""Network families: skeletons, deploy forms and their parts, under the official key names."""
