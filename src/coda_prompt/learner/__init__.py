"""The practitioner's side: a classifier that keeps learning from people's own images."""
