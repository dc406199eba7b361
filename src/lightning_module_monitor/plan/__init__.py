"""What is recorded of a model, and where: rules and the model's names become streams and planned keys."""
