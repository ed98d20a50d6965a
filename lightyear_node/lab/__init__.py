"""The laboratory: whole federations on one machine, real or simulated, and what they show."""
