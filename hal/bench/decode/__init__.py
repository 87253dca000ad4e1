"""`hal bench decode`: how fast attention reads its cache."""
