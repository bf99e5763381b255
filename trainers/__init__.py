"""What learns: one script a method, and the data preparation they share."""
