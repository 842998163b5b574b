"""GPU memory from DCGM's pages: whole, strange, cut off at every byte. What is not sure is unknown, never zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.agent.gpu_metrics import GpuMemory, read_gpus
from tests.agent import dcgm_pages as dcgm

MIB = 1 << 20
BOTH = GpuMemory(100_000 * MIB, 163_118 * MIB)
FIRST, SECOND = GpuMemory(70_000 * MIB, 81_559 * MIB), GpuMemory(30_000 * MIB, 81_559 * MIB)
UNKNOWN = GpuMemory()


def changed(old: bytes, new: bytes, **parts) -> bytes:
    found = dcgm.page(**parts)
    assert old in found
    return found.replace(old, new, 1)


def test_memory_is_over_the_gpus_that_are_named_or_all():
    page = dcgm.page()
    assert read_gpus(page) == BOTH
    assert read_gpus(page, ["0"]) == FIRST and read_gpus(page, ["1"]) == SECOND
    assert read_gpus(page, [dcgm.UUIDS[1]]) == SECOND
    assert read_gpus(page, ["0", dcgm.UUIDS[1]]) == BOTH
    assert read_gpus(page, ["0", "0", dcgm.UUIDS[0]]) == FIRST, "each once"


def test_a_named_gpu_that_is_not_there_is_not_left_out_in_silence():
    assert read_gpus(dcgm.page(), ["0", "2"]) == UNKNOWN
    assert read_gpus(dcgm.page(), ["GPU-of-another-machine"]) == UNKNOWN


def test_a_page_of_several_machines_is_no_answer_to_an_index():
    other = dcgm.page().replace(dcgm.UUIDS[0].encode(), b"GPU-elsewhere")
    assert read_gpus(dcgm.page(around=False) + other, ["0"]) == UNKNOWN
    assert read_gpus(dcgm.page(around=False) + other, [dcgm.UUIDS[0]]) == FIRST


def test_a_page_without_gpu_memory_is_none():
    assert read_gpus(b"") is None
    assert read_gpus(dcgm.page(used=None, free=None, reserved=None)) is None
    assert read_gpus(b"vllm:num_requests_running 3\n<html>\n\x00\xff\n") is None


@pytest.mark.parametrize("bad", [dcgm.BLANK, "NaN", "+Inf", "-1", "many", "1e300"])
def test_blanks_and_nonsense_make_their_figure_unknown(bad):
    page = dcgm.page(used=(bad, 30_000))
    assert read_gpus(page) == UNKNOWN and read_gpus(page, ["1"]) == SECOND
    page = dcgm.page(free=(bad, 50_559))
    assert read_gpus(page) == GpuMemory(100_000 * MIB, None)
    page = dcgm.page(reserved=(bad, 1_000))
    assert read_gpus(page, ["0"]) == GpuMemory(70_000 * MIB, None)


def test_none_used_is_zero_and_none_told_is_not():
    assert read_gpus(dcgm.page(used=(0, 0), free=(80_559, 80_559))).used_bytes == 0
    assert read_gpus(dcgm.page(used=(None, 30_000))) == UNKNOWN
    assert read_gpus(dcgm.page(used=None)) == UNKNOWN


def test_older_exporters_tell_no_reserve_and_write_uuid_small():
    page = dcgm.page(free=(11_559, 51_559), reserved=None)
    assert read_gpus(page) == BOTH
    assert read_gpus(page.replace(b"UUID=", b"uuid="), [dcgm.UUIDS[0]]) == FIRST
    assert read_gpus(page.replace(b',UUID="', b', UUID="'), [dcgm.UUIDS[0]]) == FIRST


def test_dcgms_own_total_goes_before_the_sum():
    page = dcgm.page(reserved=None) + dcgm.family("FB_TOTAL", 81_559, 81_559).encode()
    assert read_gpus(page) == BOTH
    assert read_gpus(dcgm.page() + dcgm.family("FB_TOTAL", 81_559, "NaN").encode()).total_bytes is None
    assert read_gpus(dcgm.page() + dcgm.family("FB_TOTAL", 100, 100).encode()) == UNKNOWN, "less than is used"


def test_a_broken_line_makes_its_family_unknown():
    for new in (b'DCGM_FI_DEV_FB_USED{gpu="0 70000', b"DCGM_FI_DEV_FB_USED{} 70000", b"DCGM_FI_DEV_FB_USED 7 0 0 0"):
        line = next(line for line in dcgm.page().split(b"\n") if b"FB_USED{" in line)
        assert read_gpus(changed(line, new)) == UNKNOWN
    second = dcgm.page().replace(b'gpu="1",UUID="', b'gpu="1,UUID="')
    assert read_gpus(second) == UNKNOWN and second.count(dcgm.UUIDS[1].encode()), "one GPU less is not less memory"
    assert read_gpus(changed(b"DCGM_FI_DEV_SM_CLOCK{", b"DCGM_FI_DEV_SM_CLOCK{{{")) == BOTH, "not of the matter"


def test_a_gpu_that_containers_share_counts_once_and_two_values_are_none():
    shared = dcgm.family("FB_USED", 70_000, 30_000, more='container="b",namespace="x",pod="p-2",').encode()
    assert read_gpus(dcgm.page() + shared) == BOTH
    assert read_gpus(dcgm.page() + shared.replace(b" 70000", b" 60000")) == UNKNOWN


def test_mig_instances_add_up_and_can_be_named():
    def instance(number: int, used: int) -> bytes:
        more = f'GPU_I_PROFILE="1g.10gb",GPU_I_ID="{number}",'
        return (dcgm.family("FB_USED", used, more=more) + dcgm.family("FB_FREE", 10_000 - used, more=more)).encode()

    page = instance(7, 4_000) + instance(8, 1_000)
    assert read_gpus(page) == read_gpus(page, ["0"]) == GpuMemory(5_000 * MIB, 20_000 * MIB)
    assert read_gpus(page, ["0/7"]) == GpuMemory(4_000 * MIB, 10_000 * MIB)
    assert read_gpus(page, ["0/9"]) == UNKNOWN
    assert read_gpus(dcgm.page() + page) == BOTH, "a GPU with lines of its own already counts what is in it"


def test_values_may_have_instants_and_lines_other_ends():
    stamped = dcgm.page(used=("70000 1788387174142", "30000"))
    assert read_gpus(stamped) == BOTH
    assert read_gpus(stamped.replace(b"\n", b"\r\n")) == BOTH


def test_a_cut_among_the_first_family_does_not_make_one_gpu_of_two():
    page = dcgm.family("FB_USED", 70_000, 30_000).encode()
    first = page[: page.index(b"DCGM_FI_DEV_FB_USED{", page.index(b" 70000"))]
    assert read_gpus(first, whole=False) == UNKNOWN
    assert read_gpus(first) == GpuMemory(70_000 * MIB, None), "a page that ends there has one"


@given(st.integers(0, len(dcgm.page())), st.sampled_from([(), ("0",), ("1",), ("0", "1")]))
def test_a_page_cut_anywhere_tells_the_truth_or_nothing(size, chosen):
    truth = read_gpus(dcgm.page(), chosen)
    found = read_gpus(dcgm.page()[:size], chosen, whole=False)
    if found is not None:
        assert found.used_bytes in (None, truth.used_bytes)
        assert found.total_bytes in (None, truth.total_bytes)


@given(st.binary(max_size=300))
def test_any_bytes_are_read(page):
    read_gpus(page)
    read_gpus(dcgm.page(around=False) + page)
