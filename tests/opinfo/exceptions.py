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
    "native_layer_norm": (1, "of bfloat16 the statistics are float32, as on accelerators"),
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

_STEP = "a sum of terms that were rounded to bfloat16 first, on both sides"

TOLERANCES_BFLOAT16: dict[str, tuple[float, float, str]] = {
    "nn.functional.normalize": (
        2e-2,
        0.1,
        "over a dim of size 1 the gradient is 0: what is left on both sides is the rounding of large terms",
    ),
}
"""Entries with their own rtol and atol in bfloat16."""

_COPY = "torch's result is a view here although its name promises none; ours is a copy"
_COLUMNS = "LAPACK leaves columns one after another, the meta kernel and JAX rows"
_FACTOR = "a factor that LAPACK leaves in columns, transposed or not as its shape says"

STRIDES: dict[str, str] = {
    **dict.fromkeys(("unsafe_chunk", "unsafe_split"), _COPY),
    **dict.fromkeys(("geqrf", "linalg.eig", "linalg.lstsq", "linalg.lstsq.grad_oriented"), _COLUMNS),
    **dict.fromkeys(("svd_lowrank", "pca_lowrank", "linalg.svd"), _FACTOR),
    **dict.fromkeys(("empty_strided", "new_empty_strided"), "strides with gaps or overlaps belong to views; a fresh tensor is dense"),
    "nn.functional.max_unpool2d.grad": "an order of dims that only the CPU's kernel keeps for inputs in channels-last order",
    **dict.fromkeys(("fft.hfft2", "fft.hfftn", "fft.rfft2", "fft.rfftn"), "the order of dims in which the CPU's FFT library works"),
}
"""Entries whose results may have other strides than on the CPU."""

_VALUES = "only the values show it, and looking at them would stop the graph (see torch_bridge/collectives/index_checks.py)"

ERRORS: dict[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(("gather", "scatter", "scatter_add"), (("is out of bounds for dimension", _VALUES),)),
    "multinomial": (("probability tensor contains", _VALUES), ("invalid multinomial distribution", _VALUES)),
}
"""Error inputs that are not refused as on the CPU: a piece of what the table would say, and why that is right."""

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
