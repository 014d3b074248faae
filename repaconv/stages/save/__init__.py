"""`save`: write a folder that timm or transformers loads."""
