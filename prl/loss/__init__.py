"""The trust region of policy-gradient tokens (one file a loss), and the sum of the three components."""
