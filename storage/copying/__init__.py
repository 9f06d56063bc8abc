"""Taking a deployment from one store into another: every row as it is, again after any death, compared at the end."""
