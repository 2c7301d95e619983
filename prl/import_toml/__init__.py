"""`prl import-toml`: prime-rl's TOML files as an option of prl's `experiment` group."""
