"""What is used of torch is there in all versions that are supported: ops that 2.11 lacks are hidden here."""

from __future__ import annotations

import subprocess
import sys

NEWER = (
    "_flash_attention_forward_no_dropout_inplace",
    "_foreach_clone",
    "_foreach_mm",
    "_philox_key_fold_in",
    "_philox_key_split",
    "_philox_normal",
    "_philox_normal_",
    "_philox_uniform",
    "_philox_uniform_",
    "_upsample_lanczos2d_aa",
    "_upsample_lanczos2d_aa_backward",
    "broadcast_shapes",
)
"""The aten ops of torch 2.13 that 2.11 does not have: names of `torch._C._jit_get_all_schemas()` in the one and not in the other."""

SCRIPT = f"""
import sys

import torch

find = torch._ops._OpNamespace.__getattr__


def known(self, name):
    if self.name == "aten" and name in {NEWER!r} and not sys._getframe(1).f_globals["__name__"].startswith("torch."):
        raise AttributeError(f"hidden: {{name}}")
    return find(self, name)


torch._ops._OpNamespace.__getattr__ = known
for name in {NEWER!r}:
    vars(torch.ops.aten).pop(name, None)  # torch has looked it up itself
    assert not hasattr(torch.ops.aten, name), name

import torch_xla

x = torch.arange(3.0, device=torch_xla.device(), requires_grad=True)
(x * x).sum().backward()
print(x.grad.tolist(), [t.tolist() for t in torch._foreach_mul([x.detach()], 2.0)])
"""


def test_a_step_needs_no_op_that_torch_2_11_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[0.0, 2.0, 4.0] [[0.0, 2.0, 4.0]]"
