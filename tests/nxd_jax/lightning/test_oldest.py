"""The oldest Lightning that is supported, which `make test` puts beside the newest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST = Path(sys.prefix) / "lightning-oldest"
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
from pathlib import Path
import neuronx_distributed.lightning
import lightning.pytorch
import pytorch_lightning
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from tests.nxd_jax.lightning import jobs

assert pytorch_lightning.__version__ == "2.5.0" and lightning.pytorch.Trainer is pytorch_lightning.Trainer
folder = Path(sys.argv[1])
options = dict(tp=2, zero1=True, devices=4)
def module():
    return jobs.module(tp=2, zero1=True, dropout=0.2, grad_accum_steps=2)
whole, _ = jobs.fit(folder, model=module(), max_steps=8, **options)
keep = ModelCheckpoint(dirpath=folder / "kept", save_top_k=1, monitor="global_step", mode="max", every_n_train_steps=2)
begun, _ = jobs.fit(folder, model=module(), max_steps=4, callbacks=(keep,), **options)
resumed, trainer = jobs.fit(folder, model=module(), max_steps=8, ckpt_path=keep.best_model_path, **options)
assert begun + resumed == whole, (begun, resumed, whole)
model = trainer.lightning_module
assert trainer.validate(model, jobs.loader(), verbose=False) == trainer.test(model, jobs.loader(), verbose=False)
assert len(trainer.predict(model, jobs.loader())) == 12
automatic = jobs.trainer(folder, max_steps=4, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[EarlyStopping("loss", patience=9)], **options)
automatic.fit(jobs.module(jobs.Automatic, tp=2, zero1=True, manual_opt=False), jobs.loader(), jobs.loader())
assert automatic.global_step == 4
print("fine")
"""


@pytest.mark.thorough
def test_fit_resume_evaluate_and_automatic_optimization_on_the_oldest_version(tmp_path: Path) -> None:
    if not OLDEST.is_dir():
        pytest.skip(f"{OLDEST} is not there: `make test` installs pytorch-lightning 2.5.0 there")
    path = os.pathsep.join([str(OLDEST), str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stderr[-3000:]
