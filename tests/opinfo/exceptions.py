"""Where an entry is not held to the general rule, and why: every row has its reason."""

from __future__ import annotations

_RANDOM = "random numbers of JAX, not torch's bits"
_UNINITIALIZED = "uninitialized memory"

UNDEFINED: dict[str, str] = {
    **dict.fromkeys(
        (
            "bernoulli",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "multinomial",
            "nn.functional.alpha_dropout",
            "nn.functional.dropout",
            "nn.functional.dropout2d",
            "nn.functional.dropout3d",
            "nn.functional.feature_alpha_dropout.with_train",
            "nn.functional.fractional_max_pool2d",
            "nn.functional.fractional_max_pool3d",
            "nn.functional.rrelu",
            "normal",
            "normal.in_place",
            "normal.number_mean",
            "rand_like",
            "randint",
            "randint_like",
            "randn",
            "randn_like",
            "uniform",
            "nn.FractionalMaxPool2d",
            "nn.FractionalMaxPool3d",
        ),
        _RANDOM,
    ),
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), _UNINITIALIZED),
}
"""Entries whose values nothing defines: only shapes and dtypes are compared (`test_random.py` checks distributions)."""

GAUGE: dict[str, str] = {
    "linalg.eigh": "signs of eigenvectors",
    "linalg.eig": "phases of eigenvectors",
    "linalg.svd": "signs of singular vectors",
    "svd": "signs of singular vectors",
    "svd_lowrank": "signs of singular vectors",
    "pca_lowrank": "signs of singular vectors",
}
"""Entries whose results are unique up to a choice: compared after the database's own normalization (`output_process_fn_grad`)."""

_SAVED = "in evaluation torch saves empty statistics on a CPU and the running ones on accelerators; scripts see only the first result"
_TIES = "which of several equal elements it names, torch leaves open"

FIRST_RESULTS: dict[str, tuple[int, str]] = {
    "native_batch_norm": (1, _SAVED),
    "_native_batch_norm_legit": (1, _SAVED),
    "topk": (1, _TIES),
    "kthvalue": (1, _TIES),
}
"""Entries of which only the first so many results are compared."""

TOLERANCES: dict[str, tuple[float, float, str]] = {
    "logcumsumexp": (5e-3, 5e-3, "torch's gradient formula cancels in float32: on the CPU it is as far from float64"),
    "matrix_exp": (1e-4, 1e-3, "small entries beside ones of 1e5: an error of 1e-6 of the norm"),
    "optim.LBFGS": (2e-2, 5e-3, "ten times twenty inner steps amplify rounding"),
}
"""Entries with their own rtol and atol in float32."""

REFUSED: dict[str, tuple[str, str]] = {
    "linalg.lstsq": ("Use driver='gels'", "drivers whose residuals depend on the rank of the values raise"),
    "linalg.lstsq.grad_oriented": ("Use driver='gels'", "drivers whose residuals depend on the rank of the values raise"),
    "tensor_split": ("expected tensor_indices_or_sections to be on cpu", "torch wants tensors of sections on the CPU, whatever the device"),
    "chalf": ("torch.complex32 has no JAX form", "JAX has no complex32"),
}
"""Samples that raise an error with this text instead: they are left out, and an entry without others is skipped."""

DROPS_OUT: dict[str, tuple[int, str]] = {
    "nn.functional.scaled_dot_product_attention": (3, "dropout_p"),
    "nn.functional.multi_head_attention_forward": (9, "dropout_p"),
}
"""Entries that draw random numbers where this argument (its position after the input, and name) is not zero: such samples are compared by shape only."""

SKIPPED: dict[str, str] = {
    **dict.fromkeys(
        ("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse", "optim.SparseAdam"),
        "device xla has no sparse tensors",
    )
}
"""Entries that are not run."""
