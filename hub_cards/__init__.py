"""What is published: evaluation, search, export and model cards of trained retrievers."""
