"""The kernels against independent implementations: compressed-tensors 0.20 and Transformers 5, bit for bit.

Where a library departs from the format's specification, the departure is a test of its own, named after the library.
"""

from __future__ import annotations

import pytest
import torch

from kconv.errors import BadData
from kconv.kernels import fp8, int4, mxfp4, nvfp4
from kconv.kernels.common import same_bits

ct = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")


def scheme(**weights):
    args = quantization.QuantizationArgs(**{"symmetric": True, "dynamic": False, **weights})
    return quantization.QuantizationScheme(targets=["Linear"], weights=args)


def compressor(name):
    return ct.BaseCompressor.get_value_from_registry(name)


def decompressed(name, state, **weights):
    return compressor(name).decompress(dict(state), scheme(**weights))["weight"]


MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
MXFP8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
FP8 = {"num_bits": 8, "type": "float"}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_bytes(*shape, low=0, high=256, seed=0):
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator(seed))


def finite_fp8(*shape, seed=0):
    raw = random_bytes(*shape, seed=seed)
    return torch.where((raw & 0x7F) == 0x7F, 0x31, raw).to(torch.uint8).view(torch.float8_e4m3fn)


def positive(*shape, dtype=torch.float32, seed=1):
    return (torch.rand(shape, generator=generator(seed)) * 0.03 + 1e-4).to(dtype)


class TestCompressedTensors:
    def test_mxfp4_of_every_scale_byte_that_is_a_number_and_fits(self):
        packed = random_bytes(253, 64)
        scale = torch.arange(253, dtype=torch.uint8).view(-1, 1).repeat(1, 4)
        theirs = decompressed("mxfp4-pack-quantized", {"weight_packed": packed, "weight_scale": scale}, **MXFP4)
        assert same_bits(mxfp4.decode(packed, scale), theirs)

    def test_mxfp4_of_the_two_top_scales_where_bf16_holds_the_product(self):
        packed = random_bytes(4, 16) & 0xBB  # magnitudes up to 1.5
        scale = torch.tensor([[253], [254], [253], [254]], dtype=torch.uint8)
        theirs = decompressed("mxfp4-pack-quantized", {"weight_packed": packed, "weight_scale": scale}, **MXFP4)
        assert same_bits(mxfp4.decode(packed, scale), theirs)

    def test_mxfp4_compressed_there_is_read_here(self):
        weight = torch.randn(8, 96, generator=generator(), dtype=torch.bfloat16)
        scale = torch.exp2(torch.floor(torch.log2(weight.view(8, 3, 32).abs().amax(-1).float())) - 2).bfloat16()
        state = compressor("mxfp4-pack-quantized").compress({"weight": weight, "weight_scale": scale}, scheme(**MXFP4))
        theirs = decompressed("mxfp4-pack-quantized", state, **MXFP4)
        ours = mxfp4.decode(state["weight_packed"], state["weight_scale"])
        assert same_bits(ours, theirs)
        packed, our_scale = mxfp4.quantize(weight)
        assert torch.equal(our_scale, state["weight_scale"])
        assert torch.equal(mxfp4.decode(packed, our_scale), ours)

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
    @pytest.mark.parametrize("shape", ((256, 384), (576, 200)))
    def test_fp8_block(self, dtype, shape):
        codes = finite_fp8(*shape)
        scale = positive(-(-shape[0] // 128), -(-shape[1] // 128), dtype=dtype)
        args = {**FP8, "strategy": "block", "block_structure": [128, 128]}
        theirs = decompressed("float-quantized", {"weight": codes, "weight_scale": scale}, **args)
        assert same_bits(fp8.decode(codes, scale, dtype, block=(128, 128)), theirs.contiguous())

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
    @pytest.mark.parametrize("strategy, shape", [("channel", (40, 1)), ("tensor", (1,)), ("tensor", ())])
    def test_fp8_channel_and_tensor(self, dtype, strategy, shape):
        codes, scale = finite_fp8(40, 72), positive(*shape, dtype=dtype)
        theirs = decompressed("float-quantized", {"weight": codes, "weight_scale": scale}, **FP8, strategy=strategy)
        assert same_bits(fp8.decode(codes, scale, dtype), theirs)

    def test_mxfp8(self):
        codes, scale = finite_fp8(240, 96), torch.arange(7, 247, dtype=torch.uint8).view(-1, 1).repeat(1, 3)
        theirs = decompressed("mxfp8-quantized", {"weight": codes, "weight_scale": scale}, **MXFP8)
        assert same_bits(fp8.decode(codes, scale, block=(1, 32)), theirs)

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
    @pytest.mark.parametrize("group", (32, 128))
    def test_int4_symmetric(self, dtype, group):
        packed = torch.randint(-(2**31), 2**31, (24, 64), generator=generator()).to(torch.int32)
        scale = positive(24, 512 // group, dtype=dtype)
        state = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([24, 512])}
        theirs = decompressed("pack-quantized", state, num_bits=4, type="int", strategy="group", group_size=group)
        assert same_bits(int4.decode(packed, scale, 512, dtype), theirs)

    @pytest.mark.parametrize("columns", (36, 40))
    def test_int4_per_channel(self, columns):
        packed = torch.randint(-(2**31), 2**31, (24, 5), generator=generator()).to(torch.int32)
        state = {"weight_packed": packed, "weight_scale": positive(24, 1), "weight_shape": torch.tensor([24, columns])}
        theirs = decompressed("pack-quantized", state, num_bits=4, type="int", strategy="channel")
        assert same_bits(int4.decode(packed, state["weight_scale"], columns, torch.float32), theirs)

    @pytest.mark.parametrize("rows", (24, 21))
    def test_int4_asymmetric(self, rows):
        weight = torch.randn(rows, 64, generator=generator()) + 0.5
        scale = positive(rows, 2) * 10
        zero = torch.randint(-8, 8, (rows, 2), generator=generator(2), dtype=torch.int8)
        args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor("pack-quantized").compress(state, scheme(**args))
        theirs = decompressed("pack-quantized", stored, **args)
        packed, zeros = stored["weight_packed"], stored["weight_zero_point"]
        assert torch.equal(int4.unpack_zero(zeros, rows, 2), zero)
        ours = int4.decode(packed, scale, 64, torch.float32, zero=zeros, reversible=True)
        assert same_bits(ours, theirs)
        assert torch.equal(int4.encode_with_scale(ours, scale, zero=zeros), packed)

    def test_nvfp4_with_a_global_scale_of_one_element(self):
        packed = random_bytes(40, 32)
        scale = random_bytes(40, 4, low=0, high=0x7F).view(torch.float8_e4m3fn)
        whole = torch.tensor([1234.5])
        state = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole}
        theirs = decompressed("nvfp4-pack-quantized", state, **NVFP4)
        assert same_bits(nvfp4.decode(packed, scale, whole, divides=True), theirs)


class TestDeparturesOfCompressedTensors:
    def test_the_nan_scale_is_decoded_as_infinity(self):
        packed, scale = random_bytes(1, 16) | 0x11, torch.tensor([[255]], dtype=torch.uint8)
        theirs = decompressed("mxfp4-pack-quantized", {"weight_packed": packed, "weight_scale": scale}, **MXFP4)
        assert theirs.isinf().all()
        with pytest.raises(BadData, match="255 is NaN"):
            mxfp4.decode(packed, scale)

    @pytest.mark.parametrize("byte", (253, 254))
    def test_products_beyond_bf16_become_infinite(self, byte):
        packed, scale = torch.full((1, 16), 0x77, dtype=torch.uint8), torch.tensor([[byte]], dtype=torch.uint8)
        theirs = decompressed("mxfp4-pack-quantized", {"weight_packed": packed, "weight_scale": scale}, **MXFP4)
        assert theirs.isinf().all()
        with pytest.raises(BadData, match="not representable in bfloat16"):
            mxfp4.decode(packed, scale)

    def test_minus_zero_is_packed_as_zero(self):
        packed, scale = random_bytes(8, 32), random_bytes(8, 2, low=110, high=130)
        values = mxfp4.decode(packed, scale)
        args = scheme(**MXFP4)
        unit = torch.exp2(scale.float() - 127).bfloat16()
        state = compressor("mxfp4-pack-quantized").compress({"weight": values, "weight_scale": unit}, args)
        minus_zero = torch.stack((packed & 15, packed >> 4), -1) == 8
        differs = torch.stack((packed ^ state["weight_packed"], (packed ^ state["weight_packed"]) >> 4), -1) & 15 != 0
        assert minus_zero.any()
        assert torch.equal(differs, minus_zero)
        assert torch.equal(mxfp4.encode_with_scale(values, scale), packed)

    def test_nvfp4_with_a_global_scale_without_axes_is_computed_in_bf16(self):
        packed = random_bytes(40, 32)
        scale = random_bytes(40, 4, low=0x20, high=0x7F).view(torch.float8_e4m3fn)
        state = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor(1234.5)}
        theirs = decompressed("nvfp4-pack-quantized", state, **NVFP4)
        ours = nvfp4.decode(packed, scale, torch.tensor(1234.5), divides=True)
        assert not same_bits(ours, theirs)
        assert torch.allclose(ours.float(), theirs.float(), rtol=2**-6)


class TestTransformers:
    @pytest.fixture
    def dequantise(self):
        module = pytest.importorskip("transformers.integrations.finegrained_fp8")
        return module.Fp8Dequantize(None)._dequantize_one

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
    def test_fp8_block_with_weight_scale_inv(self, dequantise, dtype):
        codes, scale = finite_fp8(256, 384), positive(2, 3)
        assert same_bits(fp8.decode(codes, scale, dtype, block=(128, 128)), dequantise(codes, scale, dtype))

    @pytest.mark.parametrize("scale_dtype", (torch.uint8, torch.float8_e8m0fnu))
    def test_mxfp8(self, dequantise, scale_dtype):
        codes, scale = finite_fp8(200, 64), random_bytes(200, 2, low=10, high=245)
        theirs = dequantise(codes, scale.view(scale_dtype), torch.bfloat16)
        assert same_bits(fp8.decode(codes, scale.view(scale_dtype), block=(1, 32)), theirs)

    def test_packed_fp4_with_e8m0_scales(self, dequantise):
        packed, scale = random_bytes(200, 32), random_bytes(200, 2, low=0, high=253)
        theirs = dequantise(packed.view(torch.int8), scale, torch.bfloat16)
        assert same_bits(mxfp4.decode(packed, scale), theirs)

    def test_mxfp4_of_gpt_oss(self):
        module = pytest.importorskip("transformers.integrations.mxfp4")
        blocks, scales = random_bytes(2, 40, 3, 16), random_bytes(2, 40, 3, low=1, high=253)
        theirs = module.convert_moe_packed_tensors(blocks, scales)
        ours = mxfp4.decode(blocks.view(2, 40, 48), scales)
        assert same_bits(ours.transpose(1, 2).contiguous(), theirs)

    def test_a_grid_that_does_not_divide_is_refused_there_and_read_here(self, dequantise):
        # KB-001
        codes, scale = finite_fp8(576, 200), positive(5, 2)
        with pytest.raises(ValueError, match="not divisible"):
            dequantise(codes, scale, torch.bfloat16)
        assert fp8.decode(codes, scale, block=(128, 128)).shape == (576, 200)


class TestTorch:
    @pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz))
    @pytest.mark.parametrize("target", (torch.bfloat16, torch.float16, torch.float32))
    def test_float8_types(self, dtype, target):
        every = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
        kept = every.float().isfinite()
        codes = torch.where(kept, every.view(torch.uint8), 0).view(dtype)
        assert same_bits(fp8.decode(codes, torch.tensor(1.0), target), codes.to(target))

    def test_e8m0_type(self):
        every = torch.arange(255, dtype=torch.uint8)
        assert torch.equal(fp8.factors(every), every.view(torch.float8_e8m0fnu).float())
