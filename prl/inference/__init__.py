"""Engines that sample from the policy, and the clients that talk to them."""
