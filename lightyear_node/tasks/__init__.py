"""Built-in tasks, written exactly as a user would write one; none of them is known to the core."""
