"""What `torch.autocast("cuda")` does to xla tensors: torch's op lists for CUDA. Scripts for Neuron write autocast that way."""

from __future__ import annotations

LOWER = (
    "_convolution", "_convolution.deprecated", "convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
    "mm", "mv", "bmm", "matmul", "linear", "einsum", "addmm", "addmv", "addr", "addbmm", "baddbmm",
    "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "prelu", "scaled_dot_product_attention",
    "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
"""Ops that compute in autocast's dtype."""

FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "softplus",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Ops that compute in float32."""

FLOAT32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord",
)  # fmt: skip
"""Ops whose option `dtype` is float32 unless it is given."""

WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Ops in whose place the overload that takes a dtype is called with float32."""

PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add",
)  # fmt: skip
"""Ops whose inputs become the widest floating-point type among them."""

BANNED = ("binary_cross_entropy",)
"""Ops that raise, because their half-precision gradients overflow."""

ELSEWHERE = (
    "cudnn_convolution", "cudnn_convolution_transpose", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
)  # fmt: skip
"""Ops on torch's list that exist for CUDA tensors only."""
