"""From raw text to groups of chunks: readers, chunking, grouping, and the prepared set on disk."""
