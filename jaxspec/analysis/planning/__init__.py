"""What the planner is made of: what is asked for, the bytes of settings, and their speed."""
