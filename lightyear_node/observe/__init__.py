"""What people and machines can see of a running node: log, metrics, health, local admin socket."""
