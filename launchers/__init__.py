"""Where processes run: roles and their placement, the local supervisor."""
