"""`save`: a folder that timm or transformers loads."""
