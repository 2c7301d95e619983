"""Configuration: the schema (one source of truth per field), composition, checks, error wording."""
