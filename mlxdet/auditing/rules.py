"""The rules as data: which primitives of MLX can race on which device, under which conditions, how one knows, and the
way out; and of every other primitive, why it cannot.

Read from MLX's sources at commit 846d17622 and from the binaries of the 0.32.4 wheels. "No atomics" means: none of the
wheel's 18,817 Metal kernels and none of its 22,267 CUDA kernels (sm_90a) has a float atomic, except those named here;
scatters are compiled when they are used, so their sources were read. A primitive in neither table has no rule, and
what contains it is not audited.
"""

from dataclasses import dataclass

READ_FROM = ("0.32.4",)
TARGETS = ("metal", "cuda", "cpu")


@dataclass(frozen=True)
class Rule:
    """One way in which an operation can give different bits, or (`unknown`) cannot be judged."""

    id: str
    operation: str  # as a user calls it
    primitives: tuple[str, ...]  # as MLX names it in a trace
    devices: tuple[str, ...]
    dtypes: str
    condition: str
    mechanism: str
    evidence: str
    remedy: str
    unknown: bool = False
    proven: str = "read"  # "read" from source or binary; "inferred" where the last link is a conclusion


RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(
            "scatter-add",
            "gradient of take(), w[ids], nn.Embedding; at[ids].add; gradient of gather_mm without sorted indices, of "
            "as_strided with overlaps",
            ("Scatter",),
            ("metal", "cuda"),
            "floating point, complex",
            "sum or product, where three updates or more can reach one destination (two, on a base that is not zero)",
            "each update is a float atomic, in the order the hardware likes; in bfloat16 the sum is rounded each time",
            "kernels/indexing/scatter.h:57, kernels/atomic.h:83 (Metal); device/scatter.cuh, atomic_ops.cuh:12 (CUDA)",
            "mlxdet.nn.Embedding or mlxdet.nn.lookup, or mlxdet.make_deterministic(model); for gather_mm gather the "
            "rows, sort, and pass the one remaining index with sorted_indices=True; for at[].add use "
            "mlxdet.model.embedding.segment_sum",
        ),
        Rule(
            "scatter-axis-add",
            "gradient of take_along_axis, cummax, cummin",
            ("ScatterAxis",),
            ("metal", "cuda"),
            "floating point, complex",
            "sum, where three indices or more along the axis can be equal (two, on a base that is not zero)",
            "each update is a float atomic, in the order the hardware likes",
            "kernels/indexing/scatter_axis.h:51 (Metal); device/scatter_axis.cuh (CUDA)",
            "take with indices that are distinct along the axis, or multiply with a one-hot matrix",
        ),
        Rule(
            "scatter-assign",
            "x[ids] = y, put_along_axis",
            ("Scatter", "ScatterAxis"),
            ("metal", "cuda"),
            "any",
            "assignment of different values, where two indices can be equal",
            "plain stores to one address: the last writer wins, and which that is, varies",
            "kernels/reduction/ops.h, struct None (Metal); scatter_ops.cuh:9 (CUDA)",
            "make the indices distinct, or choose the value per destination first",
        ),
        Rule(
            "gated-delta-vjp",
            "gradient of mx.fast.gated_delta_update",
            ("GatedDeltaUpdate", "GatedDeltaUpdateVJP"),
            ("metal",),
            "any",
            "the backward pass is taken",
            "float32 atomic adds into the gradients of q, k, gamma and beta",
            "72 kernels seq_gated_delta_vjp_* and 16 gated_delta_vjp_fused_nax_* of the wheel's metallibs contain "
            "air.atomic.global.add.f32; gated_delta_update_vjp.h:152",
            "compute the recurrence with plain operations while training",
        ),
        Rule(
            "cudnn-attention-vjp",
            "gradient of mx.fast.scaled_dot_product_attention",
            ("ScaledDotProductAttention", "ScaledDotProductAttentionVJP"),
            ("cuda",),
            "float16, bfloat16",
            "the backward pass is taken, T of the queries is a multiple of 128, the head's width a multiple of 8 and "
            "at most 128, and MLX_CUDA_USE_CUDNN_SDPA is not 0",
            "cuDNN's backward pass adds the gradient of q with atomics; MLX does not ask for its deterministic form",
            "cuda/scaled_dot_product_attention.cpp:282 (no set_deterministic_algorithm), :318; llm.c issue 652, "
            "PyTorch issue 182551",
            "set MLX_CUDA_USE_CUDNN_SDPA=0 before MLX is imported, or write attention as two products and a softmax "
            "(mlxdet.backends.cuda.attention)",
        ),
        Rule(
            "cuda-layer-norm",
            "mx.fast.layer_norm, nn.LayerNorm, forward and backward",
            ("LayerNorm", "LayerNormVJP"),
            ("cuda",),
            "float32, float16, bfloat16",
            "rows longer than 128 (float32) or 256 (float16, bfloat16)",
            "two reductions share one piece of shared memory, with one barrier too few between them: a fast warp can "
            "overwrite what a slow warp has yet to read. Rare",
            "cuda/layer_norm.cu:33, 81, 104, 157, 189; two BAR.SYNC in each of the 72 kernels where three are needed; "
            "the same in Metal was issue 2333",
            "mlxdet.make_deterministic(model), or a norm of plain operations (mlxdet.backends.cuda.norms)",
            proven="inferred",
        ),
        Rule(
            "cuda-rms-norm-vjp",
            "gradient of mx.fast.rms_norm, nn.RMSNorm",
            ("RMSNorm", "RMSNormVJP"),
            ("cuda",),
            "float32, float16, bfloat16",
            "the backward pass is taken with a weight, and the row's length is on the list of the fast kernel: "
            "multiples of 256 up to 2048, or of 512 up to 4096 (float32); of 512 and of 1024, twice as far (half)",
            "one piece of shared memory is used again for each row, without a barrier between. Rare",
            "cuda/rms_norm.cu:318, 725; one BAR.SYNC in each of the 64 kernels rms_norm_vjp_small",
            "mlxdet.make_deterministic(model), or a norm of plain operations (mlxdet.backends.cuda.norms)",
            proven="inferred",
        ),
        Rule(
            "cudnn-convolution",
            "convolutions and their gradients",
            ("Convolution",),
            ("cuda",),
            "any",
            "always: which engine cuDNN picks is not in the program",
            "cuDNN may pick an engine that splits a sum and adds the parts with atomics; MLX does not exclude those",
            "cuda/conv.cpp:100 (NONDETERMINISTIC engines are not deselected)",
            "mlxdet.nn.Conv1d, Conv2d, Conv3d (unfold the input and multiply matrices), or "
            "mlxdet.make_deterministic(model)",
            proven="inferred",
        ),
        Rule(
            "user-kernel",
            "mx.fast.metal_kernel, mx.fast.cuda_kernel",
            ("CustomKernel",),
            ("metal", "cuda"),
            "any",
            "always",
            "the source is the user's own; it can hold atomics and races",
            "not read",
            "read it for atomics and for shared memory that is written again without a barrier; test it with "
            "mlxdet.assert_repeatable",
            unknown=True,
        ),
        Rule(
            "collective",
            "mx.distributed.all_sum, all_max, all_min, sum_scatter",
            ("AllReduce", "ReduceScatter"),
            ("metal", "cuda", "cpu"),
            "any",
            "always",
            "the order of the sum depends on the library, its algorithm and the number of machines",
            "cuda/distributed/nccl.cpp:398; not read further",
            "gather, then add in an order of your own; fix NCCL_ALGO and NCCL_PROTO",
            unknown=True,
        ),
    )
}

# Why a primitive cannot race on any device: (reason, primitives).
_SAFE = (
    (
        "one thread computes one element from its inputs alone",
        """Abs Add ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTan2 ArcTanh AsType BitwiseBinary BitwiseInvert Ceil Compiled
        Conjugate ConvertFP8 Cos Cosh DivMod Divide Equal Erf ErfInv Exp Expm1 Floor FloorDivide Full Greater
        GreaterEqual Imag Less LessEqual Log Log1p LogAddExp LogicalAnd LogicalNot LogicalOr Maximum Minimum Multiply
        Negative NotEqual Power Quantize Real Remainder RoPE Round Select Sigmoid Sign Sin Sinh Sqrt Square Subtract
        Tan Tanh""",
    ),
    (
        "moves or names elements; each destination has one source",
        """AllGather Arange AsStrided Broadcast BroadcastAxes Concatenate Contiguous Copy CustomTransforms Depends
        DynamicSlice DynamicSliceUpdate ExpandDims Flatten Gather GatherAxis Load NumberOfElements Pad Recv Reshape
        Send Slice SliceUpdate Split Squeeze StopGradient Transpose Unflatten View""",
    ),
    ("each destination takes the source at its own place in a prefix sum", "MaskedScatter"),
    ("integers from a counter and a key (Threefry): each element on its own", "RandomBits"),
    (
        "a fixed tree; partial results go through memory to a second kernel, without atomics (MLX 0.17 and later)",
        "ArgReduce LogSumExp Reduce Softmax",
    ),
    ("a scan in blocks, in a fixed order, without look-back (MLX 0.29.2 and later)", "Scan"),
    (
        "one writer for each element; a split over K is added up by a second kernel in a fixed order",
        "AddMM BlockMaskedMM GatherMM GatherQMM GatherQQMM Matmul QQMatmul QuantizedMatmul SegmentedMM",
    ),
    (
        "comparisons only, in a fixed network; equal elements keep their order",
        "ArgPartition ArgSort Partition SearchSorted Sort",
    ),
    (
        "one group of threads for each row or tile, with barriers; no atomics",
        "CrossEntropy CrossEntropyVJP FFT Hadamard",
    ),
    ("runs on the CPU in every build", "Cholesky Eig Eigh Inverse LUF QRF SVD"),
)
SAFE: dict[str, str] = {name: reason for reason, names in _SAFE for name in names.split()}
# Of the primitives with rules, why they cannot race where no rule fires.
CPU_SAFE = "one thread runs the kernels one after another; a scatter is a loop"

# Names in the picture of a graph that differ from those in an export.
PICTURE_NAMES: dict[str, str] = {
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift"), "BitwiseBinary"),
    **dict.fromkeys(("Log2", "Log10"), "Log"),
    **dict.fromkeys(("And", "Or", "Sum", "Prod", "Min", "Max"), "Reduce"),
    **dict.fromkeys(("CumSum", "CumProd", "CumMin", "CumMax", "CumLogAddExp"), "Scan"),
    **dict.fromkeys(("SliceUpdate Sum", "SliceUpdate Prod", "SliceUpdate Min", "SliceUpdate Max"), "SliceUpdate"),
    **dict.fromkeys(("ToFP8", "FromFP8"), "ConvertFP8"),
    "NaNEqual": "Equal",
    "Rsqrt": "Sqrt",
    "Scatter Min": "Scatter-ordered",
    "Scatter Max": "Scatter-ordered",
}


def known(name: str) -> bool:
    """Tell whether a primitive has a rule or a reason to be safe."""
    return name in SAFE or any(name in rule.primitives for rule in RULES.values())
