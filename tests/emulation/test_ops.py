"""Each operation of the stand-in against a plain formula."""

import math
from typing import Any

import pytest

from tests.emulation import gaudi

pytestmark = [pytest.mark.needs("engine"), pytest.mark.only("v0.26.0")]


@pytest.fixture(scope="module")
def torch() -> Any:
    gaudi.install()
    import torch

    torch.manual_seed(0)
    return torch


def plain_attention(
    torch: Any, q: Any, k: Any, v: Any, allowed: Any, scale: float | None = None
) -> Any:
    """Row by row, head by head: softmax over the keys that are allowed."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1])
    shared = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if allowed(b, i, j)]
                if not keys:
                    continue
                factor = q.shape[-1] ** -0.5 if scale is None else scale
                scores = k[b, h // shared, keys] @ q[b, h, i] * factor
                out[b, h, i] = torch.softmax(scores, 0) @ v[b, h // shared, keys]
    return out


def qkv(torch: Any, heads: int = 4, kv_heads: int = 2, rows: int = 5, columns: int = 5) -> Any:
    return (
        torch.randn(2, heads, rows, 8),
        torch.randn(2, kv_heads, columns, 8),
        torch.randn(2, kv_heads, columns, 8),
    )


class TestAttention:
    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    def test_causal(self, torch: Any, kv_heads: int) -> None:
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        q, k, v = qkv(torch, kv_heads=kv_heads)
        out = FusedSDPA.apply(q, k, v, None, 0.0, True)
        torch.testing.assert_close(out, plain_attention(torch, q, k, v, lambda b, i, j: j <= i))

    @pytest.mark.parametrize("kind", ["bool", "added"])
    @pytest.mark.parametrize("per_head", [False, True])
    def test_mask(self, torch: Any, kind: str, per_head: bool) -> None:
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        q, k, v = qkv(torch)
        keep = torch.rand(2, 1, 5, 5) > 0.4
        mask = keep if kind == "bool" else torch.zeros(2, 1, 5, 5).masked_fill(~keep, -math.inf)
        if per_head:
            mask = mask.expand(2, 4, 5, 5)
        out = FusedSDPA.apply(q, k, v, mask, 0.0, False, 0.3)
        plain = plain_attention(torch, q, k, v, lambda b, i, j: keep[b, 0, i, j], 0.3)
        torch.testing.assert_close(out, plain)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_valid_lengths(self, torch: Any, side: str) -> None:
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        q, k, v = qkv(torch)
        valid = torch.tensor([3, 5], dtype=torch.int32)

        def allowed(b: int, i: int, j: int) -> bool:
            inside = j >= 5 - valid[b] if side == "left" else j < valid[b]
            return bool(j <= i and inside)

        out = FusedSDPA.apply(q, k, v, None, 0.0, True, None, "fast", True, valid, side)
        torch.testing.assert_close(out, plain_attention(torch, q, k, v, allowed))

    def test_window(self, torch: Any) -> None:
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        q, k, v = qkv(torch)
        out = FusedSDPA.apply(
            q, k, v, None, 0.0, True, None, "fast", True, None, "right", False, False, (2, 0)
        )
        plain = plain_attention(torch, q, k, v, lambda b, i, j: i - 2 <= j <= i)
        torch.testing.assert_close(out, plain)

    def test_sinks_take_their_share(self, torch: Any) -> None:
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        q, k, v = qkv(torch, kv_heads=4)
        sinks = torch.randn(4)
        out = FusedSDPA.apply(
            q,
            k,
            v,
            None,
            0.0,
            True,
            None,
            "fast",
            True,
            None,
            "right",
            False,
            False,
            (-1, -1),
            sinks,
        )
        for h in range(4):
            scores = q[0, h] @ k[0, h].T * 8**-0.5
            scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
            with_sink = torch.cat((scores, sinks[h].expand(5, 1)), dim=-1)
            plain = torch.softmax(with_sink, -1)[:, :-1] @ v[0, h]
            torch.testing.assert_close(out[0, h], plain)

    def test_statistics_put_two_chunks_together(self, torch: Any) -> None:
        q, k, v = qkv(torch, kv_heads=4)

        def part(keys: slice) -> Any:
            return torch.ops.hpu.sdpa_recomp_fwd(
                q, k[:, :, keys], v[:, :, keys], None, 0.0, 0.3, False, False, "fast", None, "right"
            )[:3]

        (out1, max1, inv1), (out2, max2, inv2) = part(slice(0, 2)), part(slice(2, 5))
        top = torch.maximum(max1, max2)
        sum1, sum2 = torch.exp(max1 - top) / inv1, torch.exp(max2 - top) / inv2
        merged = (sum1 * out1 + sum2 * out2) / (sum1 + sum2)
        plain = plain_attention(torch, q, k, v, lambda b, i, j: True, 0.3)
        torch.testing.assert_close(merged, plain)

    def test_fp8(self, torch: Any) -> None:
        from habana_frameworks.torch.hpex.kernels import fp8_fused_sdpa

        q, k, v = qkv(torch)
        small = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
        two = torch.tensor(2.0)
        out = fp8_fused_sdpa(*small, is_causal=True, d_scale_q=two, d_scale_v=two)[0]
        wide = [x.float() for x in small]
        plain = plain_attention(torch, wide[0] * 2, wide[1], wide[2] * 2, lambda b, i, j: j <= i)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), plain, rtol=1e-2, atol=1e-2)


class TestPagedSoftmax:
    """Blocks of sequences: 0 has two, 1 has one, and the last is padding."""

    def test_blocks_together_are_one_softmax(self, torch: Any) -> None:
        attn = torch.randn(4, 2, 1, 1, 6)
        bias = torch.zeros(4, 1, 1, 1, 6)
        bias[2, ..., 4:] = -math.inf
        groups = torch.tensor([0, 0, 1, -1])
        values = torch.randn(4, 2, 1, 6, 3)

        soft, largest, sums = torch.ops.hpu.block_softmax(attn, bias, groups)
        factor = torch.ops.hpu.block_softmax_adjustment(largest, sums, groups, 2, [4, 2, 1, 1, 1])
        parts = soft @ values * factor

        scores = attn + bias
        first = torch.softmax(torch.cat((scores[0], scores[1]), -1), -1)
        plain = first @ torch.cat((values[0], values[1]), -2)
        torch.testing.assert_close(parts[0] + parts[1], plain)
        torch.testing.assert_close(parts[2], torch.softmax(scores[2], -1) @ values[2])

    def test_running_softmax(self, torch: Any) -> None:
        scores, values = torch.randn(3, 8), torch.randn(8, 2)
        soft1, max1, sum1, _ = torch.ops.hpu.softmax_fa2(scores[:, :5])
        soft2, _, total, before = torch.ops.hpu.softmax_fa2(scores[:, 5:], max1, sum1)
        out = (before * (soft1 @ values[:5]) + soft2 @ values[5:]) / total
        torch.testing.assert_close(out, torch.softmax(scores, -1) @ values)


class TestRotaryAndNorm:
    def test_blockwise(self, torch: Any) -> None:
        from habana_frameworks.torch.hpex.kernels import (
            RotaryPosEmbeddingMode,
            apply_rotary_pos_emb,
        )

        x, angle = torch.randn(1, 3, 2, 8), torch.rand(1, 3, 1, 4)
        cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
        out = apply_rotary_pos_emb(x, cos, sin, None, 0, RotaryPosEmbeddingMode.BLOCKWISE)
        turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1))

    def test_pairwise(self, torch: Any) -> None:
        from habana_frameworks.torch.hpex.kernels import (
            RotaryPosEmbeddingMode,
            apply_rotary_pos_emb,
        )

        x, angle = torch.randn(1, 3, 2, 8), torch.rand(1, 3, 1, 4)
        cos, sin = (f(angle).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
        out = apply_rotary_pos_emb(x, cos, sin, None, 0, RotaryPosEmbeddingMode.PAIRWISE)
        pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(out, torch.view_as_real(turned).flatten(-2))

    def test_positions_pick_rows(self, torch: Any) -> None:
        from habana_frameworks.torch.hpex.kernels import apply_rotary_pos_emb

        x, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(10, 8), torch.randn(10, 8)
        positions = torch.tensor([[4, 7, 0]])
        out = apply_rotary_pos_emb(x, cos, sin, positions)
        rows = apply_rotary_pos_emb(x, cos[positions[0]], sin[positions[0]])
        torch.testing.assert_close(out, rows)

    def test_one_wide_input_makes_all_wide(self, torch: Any) -> None:
        from habana_frameworks.torch.hpex.kernels import apply_rotary_pos_emb

        x = torch.randn(1, 1, 8).bfloat16()
        table = torch.ones(1, 1, 8)
        assert apply_rotary_pos_emb(x, table, table).dtype == torch.float32
        assert apply_rotary_pos_emb(x, table.bfloat16(), table.bfloat16()).dtype == torch.bfloat16

    def test_rms_norm(self, torch: Any) -> None:
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        x, weight = torch.randn(3, 7), torch.randn(7)
        plain = torch.stack([row / math.sqrt((row**2).mean() + 1e-5) * weight for row in x])
        torch.testing.assert_close(FusedRMSNorm.apply(x, weight, 1e-5), plain)


class TestFp8:
    def test_cast_saturates_at_the_card_s_limit(self, torch: Any) -> None:
        wide = torch.tensor([1000.0, 0.3, -1000.0])
        small, amax = torch.ops.hpu.cast_to_fp8_v2(wide, None, False, True, torch.float8_e4m3fn)
        assert small.float().tolist()[::2] == [240.0, -240.0]
        assert amax.item() == 1000.0

    def test_there_and_back(self, torch: Any) -> None:
        x = torch.randn(4, 6)
        for scale in (torch.tensor(4.0), 4.0):
            inverse = 0.25 if isinstance(scale, float) else torch.tensor(0.25)
            small = torch.ops.hpu.cast_to_fp8_v2(x, scale, False, False, torch.float8_e4m3fn)[0]
            back = torch.ops.hpu.cast_from_fp8(small, inverse, torch.float32)
            torch.testing.assert_close(back, x, rtol=0.07, atol=1e-2)

    def test_scale_for_each_column(self, torch: Any) -> None:
        x, scale = torch.ones(2, 3), [1.0, 2.0, 4.0]
        small = torch.ops.hpu.cast_to_fp8_v2(x, scale, False, False, torch.float8_e4m3fn, [1, 3])[0]
        assert small.float().tolist() == [scale, scale]

    @pytest.mark.parametrize("transposed", [False, True])
    def test_gemm(self, torch: Any, transposed: bool) -> None:
        a = torch.randn(3, 4).to(torch.float8_e4m3fn)
        b = torch.randn(4, 5).to(torch.float8_e4m3fn)
        rows, columns = torch.rand(3, 1), torch.rand(5)
        bias, add = torch.randn(5), torch.randn(3, 5)
        out = torch.ops.hpu.fp8_gemm_v2(
            a,
            False,
            b.t() if transposed else b,
            transposed,
            add,
            torch.float32,
            rows,
            columns,
            bias,
            True,
        )
        torch.testing.assert_close(out, (a.float() @ b.float()) * rows * columns + bias + add)


class TestFourBits:
    def pack(self, torch: Any, values: Any) -> Any:
        words = [sum(int(v) << (4 * n) for n, v in enumerate(row)) for row in values.view(-1, 8)]
        signed = [w - (1 << 32) if w >= 1 << 31 else w for w in words]
        return torch.tensor(signed, dtype=torch.int32).view(values.shape[0], -1)

    @pytest.mark.parametrize("named", [False, True])
    def test_groups_of_rows(self, torch: Any, named: bool) -> None:
        values, zeros = torch.randint(0, 16, (6, 16)), torch.randint(0, 16, (2, 16))
        scales = torch.randn(2, 16)
        group = torch.tensor([0, 1, 1, 0, 1, 0]) if named else torch.tensor([0, 0, 0, 1, 1, 1])
        out = torch.ops.hpu.convert_from_uint4(
            self.pack(torch, values),
            scales,
            self.pack(torch, zeros),
            torch.float32,
            group if named else None,
        )
        plain = [
            [(values[i, j] - zeros[group[i], j]) * scales[group[i], j] for j in range(16)]
            for i in range(6)
        ]
        torch.testing.assert_close(out, torch.tensor(plain))

    def test_no_zero_point(self, torch: Any) -> None:
        values, scale = torch.randint(0, 16, (2, 8)), torch.randn(2, 8)
        out = torch.ops.hpu.convert_from_uint4(self.pack(torch, values), scale, None, torch.float32)
        torch.testing.assert_close(out, values * scale)


class TestMixtureOfExperts:
    """Four experts of which this rank has those from 1 to 3."""

    def arguments(self, torch: Any) -> tuple[Any, Any, Any, list[Any], list[Any]]:
        hidden = torch.randn(5, 6)
        share, table = torch.topk(torch.softmax(torch.randn(5, 4), -1), 2)
        w12 = [torch.randn(2 * 8, 6) for _ in range(3)]
        w3 = [torch.randn(6, 8) for _ in range(3)]
        return hidden, table, share, w12, w3

    def plain(self, torch: Any, hidden: Any, table: Any, share: Any, w12: Any, w3: Any) -> Any:
        out = torch.zeros_like(hidden)
        for t in range(len(hidden)):
            for c in range(table.shape[1]):
                expert = table[t, c].item() - 1
                if expert < 0:
                    continue
                gate, up = w12[expert][:8] @ hidden[t], w12[expert][8:] @ hidden[t]
                out[t] += share[t, c] * (w3[expert] @ (gate * torch.sigmoid(gate) * up))
        return out

    def test_fused_weights(self, torch: Any) -> None:
        hidden, table, share, w12, w3 = self.arguments(torch)
        out = torch.ops.hpu.mixture_of_experts(
            hidden_states=hidden,
            expert_routing_table=table,
            router_weights=share,
            w12=w12,
            w3=w3,
            permuted_weights=True,
            activation="silu",
            experts_min=1,
            experts_max=3,
        )
        torch.testing.assert_close(out, self.plain(torch, hidden, table, share, w12, w3))

    @pytest.mark.parametrize("permuted", [True, False])
    def test_separate_weights_and_layouts(self, torch: Any, permuted: bool) -> None:
        hidden, table, share, w12, w3 = self.arguments(torch)
        lay = (lambda w: w) if permuted else (lambda w: w.t())
        out = torch.ops.hpu.mixture_of_experts(
            hidden,
            table,
            share,
            [lay(w[:8]) for w in w12],
            [lay(w[8:]) for w in w12],
            [lay(w) for w in w3],
            permuted,
            "silu",
            1,
            3,
        )
        torch.testing.assert_close(out, self.plain(torch, hidden, table, share, w12, w3))

    def test_bias(self, torch: Any) -> None:
        hidden, table, share, w12, w3 = self.arguments(torch)
        bias12, bias3 = [torch.randn(16) for _ in w12], [torch.randn(6) for _ in w3]
        out = torch.ops.hpu.mixture_of_experts.bias_fused_weights(
            hidden, table, share, w12, w3, bias12, bias3, True, 1, 3
        )
        plain = torch.zeros_like(hidden)
        for t in range(len(hidden)):
            for c in range(2):
                e = table[t, c].item() - 1
                if e >= 0:
                    both = w12[e] @ hidden[t] + bias12[e]
                    gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
                    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                    plain[t] += share[t, c] * (w3[e] @ inner + bias3[e])
        torch.testing.assert_close(out, plain)

    @pytest.mark.parametrize("overload", ["fp8_fused_weights_dynamic", "fp8_fused_weights"])
    def test_fp8(self, torch: Any, overload: str) -> None:
        hidden, table, share, w12, w3 = self.arguments(torch)
        eight = torch.float8_e4m3fn
        scale12, scale3 = [torch.rand(16) for _ in w12], [torch.rand(6) for _ in w3]
        scale_in = torch.rand(5, 1)
        small = hidden.to(eight), [w.to(eight) for w in w12], [w.to(eight) for w in w3]
        inner = [] if overload.endswith("dynamic") else [[torch.tensor(0.1)] * 3]
        out = getattr(torch.ops.hpu.mixture_of_experts, overload)(
            small[0],
            table,
            share,
            small[1],
            small[2],
            scale_in,
            *inner,
            scale12,
            scale3,
            True,
            "silu",
            1,
            3,
        )
        plain = self.plain(
            torch,
            small[0].float() * scale_in,
            table,
            share,
            [w.float() * s[:, None] for w, s in zip(small[1], scale12, strict=True)],
            [w.float() * s[:, None] for w, s in zip(small[2], scale3, strict=True)],
        )
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), plain, rtol=0.1, atol=0.1)

    def test_the_dispatcher_knows_every_overload(self, torch: Any) -> None:
        names = torch.ops.hpu.mixture_of_experts.overloads()
        assert names.index("fp8_fused_weights_scalars") < names.index("fp8_fused_weights_dynamic")
        assert {"default", "fused_weights", "bias_fused_weights"} <= set(names)
