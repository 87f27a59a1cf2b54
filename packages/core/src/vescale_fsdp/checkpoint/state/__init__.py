"""What models and optimizers have, as it is saved and loaded."""
