"""LoRA, under any method: W x + b + s B (A x) is one linear layer with W + s B A.

A checkpoint may carry such adapters whatever else it is. With `with_adapters` a method sees the merged
weights, and its reading puts the adapters back, so that it stays the network as trained.

Known are the layouts of PYRA's official code (``LoRA_a``, ``LoRA_b`` beside ``qkv``, s = 1), of PEFT
(``base_layer``, ``lora_A.default``) and of loralib (``lora_A``, ``lora_B``). The latter two scale by alpha / r, or by
alpha / sqrt(r) as rank-stabilised LoRA, and no tensor tells alpha. Nor does one tell whether s B A was merged into W
before saving while A and B stayed beside it: loralib merges on ``eval()``, PEFT only where it is asked to.
"""

from repaconv.trained.lora.adapters import require_base as require_base
from repaconv.trained.lora.layer import LoraLinear as LoraLinear
from repaconv.trained.lora.method import with_adapters as with_adapters
