"""How heads learn: conversations, masks, distillation, target features, the training loop."""
