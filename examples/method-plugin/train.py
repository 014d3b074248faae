"""Train a small DiracNet on digits in some seconds: writes dirac.pth, and val.npz with images it has not seen.

Usage: python train.py [EPOCHS]
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from repaconv_dirac.checkpoint import ARCHS
from repaconv_dirac.network import DiracNet

from repaconv import models

EPOCHS = int(sys.argv[1]) if sys.argv[1:] else 20
SEEN = 400

torch.manual_seed(0)
digits = np.load(models.HELD_OUT)
images, labels = torch.from_numpy(digits["input"]), torch.from_numpy(digits["labels"])
net = DiracNet(ARCHS["digits"], trained=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
for _ in range(EPOCHS):
    for batch in torch.randperm(SEEN).split(40):
        loss = F.cross_entropy(net(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

net.eval()
with torch.no_grad():
    accuracy = (net(images[SEEN:]).argmax(1) == labels[SEEN:]).double().mean()
torch.save({"state_dict": net.state_dict()}, "dirac.pth")
np.savez("val.npz", input=images[SEEN:].numpy(), labels=labels[SEEN:].numpy())
print(f"dirac.pth: top-1 accuracy {accuracy:.1%} on the {len(labels) - SEEN} images of val.npz")
