"""kvkeep."""
