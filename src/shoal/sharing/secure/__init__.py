"""What secure aggregation is made of: a ring, masks, shares of secrets, and who masks with whom."""
