"""The retrieval metric; this folder is what `evaluate.load` reads."""
