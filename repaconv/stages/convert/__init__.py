"""`score`, `convert` and `finetune`."""
