"""What a classifier stores and what is solved from it: sums that add up over lessons, in NumPy."""
