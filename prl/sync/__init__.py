"""Weight transfer: a version is written whole, marked complete, and proven equal on both sides."""
