"""Turns GPU inventories into the right node labels."""
