"""What a model is: metadata and tensor names turned into a declarative `ModelSpec`. No arithmetic."""
