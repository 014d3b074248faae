"""A small network that no method knows: convolution, BatchNorm, parallel branches."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.side = nn.Conv2d(8, 8, 1)
        self.main = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.side(x) + self.main(x))
        return self.head(x.mean((2, 3)))


def build():
    return Net()
