"""A sweep: its directory and book, its elements, and what is told when they have ended."""
