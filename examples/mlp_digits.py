"""The PyTorch NeuronX guide's MLP tutorial on handwritten digits: three linear layers, SGD, one `xm.mark_step()` per step.

The data is scikit-learn's bundled set (1,797 images of 8 x 8 pixels). Set DISABLE_XLA=1 for plain PyTorch on the CPU.

    python examples/mlp_digits.py
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

device = "cpu"
if not os.environ.get("DISABLE_XLA"):
    import torch_xla.core.xla_model as xm

    device = "xla"


def mark_step() -> None:
    if not os.environ.get("DISABLE_XLA"):
        xm.mark_step()


class MLP(nn.Module):
    def __init__(self, input_size: int = 64, output_size: int = 10, layers: tuple[int, int] = (120, 84)):
        super().__init__()
        self.fc1 = nn.Linear(input_size, layers[0])
        self.fc2 = nn.Linear(layers[0], layers[1])
        self.fc3 = nn.Linear(layers[1], output_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return F.log_softmax(self.fc3(x), dim=1)


def load_data(batch_size: int) -> tuple[DataLoader, torch.Tensor, torch.Tensor]:
    """A shuffled training loader, and the images and labels of the test set (every fifth image)."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 4
    train_set = TensorDataset(images[~is_test], labels[~is_test])
    return DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True), images[is_test], labels[is_test]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    train_loader, test_images, test_labels = load_data(args.batch)
    model = MLP().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.NLLLoss()

    print(f"Training on device {device} ...")
    model.train()
    start = time.time()
    for epoch in range(args.epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            images, labels = images.to(device), labels.to(device)
            loss = loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()
            mark_step()  # compile and run the step
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    steps = args.epochs * len(train_loader)
    print(f"{steps} steps in {time.time() - start:.1f} s")

    model.eval()
    with torch.no_grad():
        correct = (model(test_images.to(device)).argmax(dim=1).cpu() == test_labels).sum().item()
    print(f"Test accuracy: {100 * correct / len(test_labels):.1f} %")


if __name__ == "__main__":
    main()
