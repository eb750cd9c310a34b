"""A cluster adds up, comes out of any launcher's environment the same, and lays its devices out as the tables say."""

from __future__ import annotations

import copy
import pickle

import pytest

from epl.cluster import Cluster, Device
from epl.errors import ClusterError


def _laid_out(cluster: Cluster, counts: list[int], **how) -> list[str]:
    return [str(virtual) for virtual in cluster.virtual_devices(counts, **how)]


def test_one_worker_of_one_device_is_the_default():
    cluster = Cluster()
    assert (cluster.worker_num, cluster.worker_index, cluster.rank, cluster.local_rank) == (1, 0, 0, 0)
    assert (cluster.world_size, cluster.total_gpu_num, cluster.gpu_num_per_worker) == (1, 1, 1)
    assert cluster.devices == (Device(0, 0, 0),)


def test_ranks_count_devices_worker_by_worker_even_if_workers_differ():
    cluster = Cluster((2, 1, 3), rank=4)
    assert [str(device) for device in cluster.devices] == ["w0d0", "w0d1", "w1d0", "w2d0", "w2d1", "w2d2"]
    assert [device.rank for device in cluster.devices] == list(range(6))
    assert (cluster.worker_num, cluster.world_size) == (3, 6)
    assert (cluster.worker_index, cluster.local_rank) == (2, 1)
    with pytest.raises(ClusterError, match=r"workers have \(2, 1, 3\) devices; read cluster\.devices_per_worker"):
        _ = cluster.gpu_num_per_worker


def test_hosts_have_names_even_if_none_were_given():
    assert Cluster((1, 1)).hosts == ("worker0", "worker1")
    assert Cluster((1, 1), hosts=("a:1", "b:1")).hosts == ("a:1", "b:1")


def test_a_cluster_is_a_value():
    cluster = Cluster((4, 4), rank=3, hosts=("a", "b"), device_kind="A100")
    assert pickle.loads(pickle.dumps(cluster)) == copy.deepcopy(cluster) == cluster
    assert hash(cluster) == hash(copy.deepcopy(cluster))
    assert cluster.virtual_devices([2, 2]) == cluster.virtual_devices([2, 2])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"devices_per_worker": ()}, r"one count of at least 1 for each worker, got \(\)"),
        ({"devices_per_worker": (4, 0)}, r"got \(4, 0\)"),
        ({"devices_per_worker": (True,)}, r"got \(True,\)"),
        ({"devices_per_worker": (4,), "rank": 4}, "rank 4 is outside of the 4 ranks"),
        ({"devices_per_worker": (4,), "rank": -1}, "rank -1 is outside"),
        ({"devices_per_worker": (4, 4), "hosts": ("a",)}, "1 hosts were given for 2 workers"),
    ],
)
def test_numbers_that_contradict_one_another_are_refused(given: dict, expected: str):
    with pytest.raises(ClusterError, match=expected):
        Cluster(**given)


@pytest.mark.parametrize(
    ("spec", "counts", "kind"),
    [("1x1", (1,), ""), ("2x4", (4, 4), ""), ("2x8:V100-32GB", (8, 8), "V100-32GB"), (" 3x2 ", (2, 2, 2), "")],
)
def test_a_spec_gives_workers_devices_and_kind_and_is_printed_back(spec: str, counts: tuple[int, ...], kind: str):
    cluster = Cluster.from_spec(spec)
    assert (cluster.devices_per_worker, cluster.device_kind, cluster.rank) == (counts, kind, 0)
    assert str(cluster) == spec.strip()


@pytest.mark.parametrize("spec", ["", "8", "2x", "x4", "0x4", "2x0", "2*4", "2x4:", "2x4,1x2", "-1x4"])
def test_a_text_that_is_no_spec_is_refused(spec: str):
    with pytest.raises(ClusterError, match="is not a cluster; write '2x4' or '2x8:V100-32GB'"):
        Cluster.from_spec(spec)


def _torchrun(rank: int, counts: tuple[int, ...]) -> dict[str, str]:
    """What torchrun sets for a rank."""
    device = Cluster(counts).devices[rank]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(sum(counts)),
        "LOCAL_RANK": str(device.index),
        "LOCAL_WORLD_SIZE": str(counts[device.worker]),
        "GROUP_RANK": str(device.worker),
        "GROUP_WORLD_SIZE": str(len(counts)),
        "MASTER_ADDR": "10.0.0.1",
    }


def _slurm(rank: int, counts: tuple[int, ...], tasks_per_node: str) -> dict[str, str]:
    """What srun sets for a task."""
    device = Cluster(counts).devices[rank]
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_LOCALID": str(device.index),
        "SLURM_NODEID": str(device.worker),
        "SLURM_TASKS_PER_NODE": tasks_per_node,
    }


def _without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_nothing_set_is_one_process():
    assert Cluster.from_environment({}) == Cluster()
    # A shell inside of a Slurm allocation: nothing was started by srun.
    assert Cluster.from_environment({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "8"}) == Cluster()


@pytest.mark.parametrize("counts", [(1,), (4,), (4, 4), (1, 1, 1), (4, 2), (1, 3)])
def test_every_rank_that_torchrun_starts_sees_the_same_cluster(counts: tuple[int, ...]):
    for rank in range(sum(counts)):
        assert Cluster.from_environment(_torchrun(rank, counts)) == Cluster(counts, rank=rank)


def test_torchrun_without_groups_means_equal_workers():
    environ = _without(_torchrun(5, (4, 4)), "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert Cluster.from_environment(environ) == Cluster((4, 4), rank=5)


def test_one_rank_needs_nothing_local():
    assert Cluster.from_environment({"RANK": "0", "WORLD_SIZE": "1"}) == Cluster()


def test_three_unequal_workers_are_refused_by_at_least_one_rank():
    """The rank of a worker with the mean count cannot tell; another one can, and ends the run."""
    with pytest.raises(
        ClusterError, match="WORLD_SIZE=6, GROUP_WORLD_SIZE=3 and LOCAL_WORLD_SIZE=1: the workers differ"
    ):
        Cluster.from_environment(_torchrun(2, (2, 1, 3)))


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (("WORLD_SIZE",), "but not WORLD_SIZE; set the rest, or start the script with 'epl launch' or torchrun"),
        (("RANK",), "but not RANK;"),
        (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), "but not LOCAL_RANK, LOCAL_WORLD_SIZE;"),
    ],
)
def test_an_incomplete_torchrun_environment_is_refused_with_what_is_missing(missing: tuple[str, ...], expected: str):
    with pytest.raises(ClusterError, match=f"the environment has .*{expected}"):
        Cluster.from_environment(_without(_torchrun(5, (4, 4)), *missing))


def test_torchrun_without_groups_and_with_a_remainder_asks_for_groups():
    environ = _without(_torchrun(0, (4, 2)), "GROUP_RANK", "GROUP_WORLD_SIZE")
    with pytest.raises(ClusterError, match="but not GROUP_RANK, GROUP_WORLD_SIZE"):
        Cluster.from_environment(environ)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"RANK": "one"}, "RANK='one' is not a whole number of at least 0"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' is not a whole number of at least 1"),
        ({"RANK": "8"}, "rank 8 is outside of the 8 ranks"),
        ({"RANK": "2"}, r"rank 2 of \(4, 4\) devices is w0d2, but w1d1 by the environment"),
    ],
)
def test_a_contradictory_torchrun_environment_is_refused(change: dict[str, str], expected: str):
    with pytest.raises(ClusterError, match=expected):
        Cluster.from_environment(_torchrun(5, (4, 4)) | change)


def test_all_variables_that_are_no_numbers_come_in_one_message():
    with pytest.raises(ClusterError, match=r"(?s)RANK='a'.*WORLD_SIZE='b'"):
        Cluster.from_environment(_torchrun(0, (2,)) | {"RANK": "a", "WORLD_SIZE": "b"})


@pytest.mark.parametrize(
    ("counts", "text"),
    [((4,), "4"), ((4, 4), "4(x2)"), ((4, 4, 3), "4(x2),3"), ((2, 4, 4, 1), "2,4(x2),1"), ((1, 1, 1), "1(x3)")],
)
def test_every_task_that_slurm_starts_sees_the_same_cluster(counts: tuple[int, ...], text: str):
    for rank in range(sum(counts)):
        assert Cluster.from_environment(_slurm(rank, counts, text)) == Cluster(counts, rank=rank)


def test_slurm_with_the_number_of_tasks_per_node_only():
    environ = _slurm(5, (4, 4), "") | {"SLURM_NTASKS_PER_NODE": "4"}
    assert Cluster.from_environment(environ) == Cluster((4, 4), rank=5)
    assert Cluster.from_environment(_slurm(0, (1,), "")) == Cluster()


def test_torchrun_wins_where_slurm_started_it():
    environ = _slurm(1, (1, 1), "1(x2)") | _torchrun(5, (4, 4))
    assert Cluster.from_environment(environ) == Cluster((4, 4), rank=5)


def test_a_world_size_exported_for_torch_does_not_hide_slurm():
    environ = _slurm(5, (4, 4), "4(x2)") | {"WORLD_SIZE": "8", "MASTER_ADDR": "a"}
    assert Cluster.from_environment(environ) == Cluster((4, 4), rank=5)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            _without(_slurm(5, (4, 4), "4(x2)"), "SLURM_NTASKS"),
            "but not SLURM_NTASKS; set the rest, or start .* 'srun ",
        ),
        (_slurm(5, (4, 4), ""), "but not SLURM_NTASKS_PER_NODE"),
        (_slurm(5, (4, 4), "4x2"), "SLURM_TASKS_PER_NODE='4x2' is not in Slurm's form, such as '4\\(x2\\),3'"),
        (_slurm(5, (4, 4), "4"), r"SLURM_NTASKS=8, but nodes of \(4,\) tasks have 4"),
        (_slurm(5, (4, 4), "") | {"SLURM_NTASKS_PER_NODE": "3"}, r"SLURM_NTASKS=8, but nodes of \(3, 3\) tasks have 6"),
        (_slurm(5, (4, 4), "4(x2)") | {"SLURM_NODEID": "0"}, "is w1d1, but w0d1 .* --distribution=block"),
    ],
)
def test_a_slurm_environment_that_does_not_add_up_is_refused(environ: dict[str, str], expected: str):
    with pytest.raises(ClusterError, match=expected):
        Cluster.from_environment(environ)


@pytest.mark.parametrize(
    ("workers", "counts", "intra", "expected"),
    [
        ((4,), [1, 1], True, ["{w0d0},{w0d2}", "{w0d1},{w0d3}"]),
        ((4, 4), [2, 2], True, ["{w0d0,w0d1},{w1d0,w1d1}", "{w0d2,w0d3},{w1d2,w1d3}"]),
        ((4, 4), [2, 2], False, ["{w0d0,w1d0},{w0d2,w1d2}", "{w0d1,w1d1},{w0d3,w1d3}"]),
        ((4, 4), [1, 1, 2], True, ["{w0d0},{w1d0}", "{w0d1},{w1d1}", "{w0d2,w0d3},{w1d2,w1d3}"]),
        ((4, 4), [1, 1, 2], False, ["{w0d0},{w0d2}", "{w1d0},{w1d2}", "{w0d1,w1d1},{w0d3,w1d3}"]),
        ((4, 4), [4, 4], True, ["{w0d0,w0d1,w0d2,w0d3}", "{w1d0,w1d1,w1d2,w1d3}"]),
        ((4, 4), [4, 4], False, ["{w0d0,w1d0,w0d1,w1d1}", "{w0d2,w1d2,w0d3,w1d3}"]),
        ((2, 1, 3), [1, 2], True, ["{w0d0},{w2d0}", "{w0d1,w1d0},{w2d1,w2d2}"]),
        ((2, 1, 3), [1, 2], False, ["{w0d0},{w0d1}", "{w1d0,w2d0},{w2d1,w2d2}"]),
        ((3,), [1], True, ["{w0d0},{w0d1},{w0d2}"]),
        ((8,), [3, 5], True, ["{w0d0,w0d1,w0d2}", "{w0d3,w0d4,w0d5,w0d6,w0d7}"]),
    ],
)
def test_auto_fills_replica_by_replica_and_in_it_taskgraph_by_taskgraph(
    workers: tuple[int, ...], counts: list[int], intra: bool, expected: list[str]
):
    assert _laid_out(Cluster(workers), counts, prefer_intra_node=intra) == expected


@pytest.mark.parametrize("intra", [True, False])
@pytest.mark.parametrize("counts", [[1], [1, 1], [2, 1, 1], [1, 3, 4]])
def test_auto_uses_every_device_once_and_keeps_the_counts(counts: list[int], intra: bool):
    cluster = Cluster((8, 4, 4))
    laid_out = cluster.virtual_devices(counts, prefer_intra_node=intra)
    assert sorted(d.rank for virtual in laid_out for d in virtual.devices) == list(range(16))
    assert [virtual.index for virtual in laid_out] == list(range(len(counts)))
    for virtual, count in zip(laid_out, counts, strict=True):
        assert [len(replica) for replica in virtual.replicas] == [count] * (16 // sum(counts))


@pytest.mark.parametrize(
    ("total", "counts", "expected"),
    [
        (8, [1, 2], r"8 devices are not divisible by 3, .* device counts \[1, 2\]; 6 or 9 devices would do"),
        (1, [1, 1], r"1 devices are not divisible by 2, .* device counts \[1, 1\]; 2 devices would do"),
    ],
)
def test_devices_that_do_not_divide_are_refused_with_the_numbers(total: int, counts: list[int], expected: str):
    with pytest.raises(ClusterError, match=expected):
        Cluster((total,)).virtual_devices(counts)


@pytest.mark.parametrize("counts", [[], [0], [1, -1], [True], [1.0]])
def test_counts_that_are_no_counts_are_refused(counts: list):
    with pytest.raises(ClusterError, match="device_counts is one count of at least 1 for each TaskGraph"):
        Cluster((4,)).virtual_devices(counts)


@pytest.mark.parametrize("how", [{"colocate": True}, {"layout": "all"}, {"layout": "all", "colocate": True}])
def test_taskgraphs_that_share_devices_have_the_same_ones(how: dict):
    assert _laid_out(Cluster((4,)), [4, 4], **how) == ["{w0d0,w0d1,w0d2,w0d3}"] * 2
    assert _laid_out(Cluster((2, 2)), [2, 2], **how) == ["{w0d0,w0d1},{w1d0,w1d1}"] * 2
    assert _laid_out(Cluster((2, 2)), [1], **how) == ["{w0d0},{w0d1},{w1d0},{w1d1}"]
    assert _laid_out(Cluster((2, 2)), [2, 2], prefer_intra_node=False, **how) == ["{w0d0,w1d0},{w0d1,w1d1}"] * 2


def test_taskgraphs_that_share_devices_need_equal_counts_that_divide():
    with pytest.raises(ClusterError, match=r"share the same devices need equal device counts, got \[1, 4\]"):
        Cluster((4,)).virtual_devices([1, 4], colocate=True)
    with pytest.raises(ClusterError, match=r"4 devices are not divisible by 3, .*colocated device counts \[3, 3\]"):
        Cluster((4,)).virtual_devices([3, 3], colocate=True)


def test_a_specific_layout_is_taken_as_written_by_rank_or_by_name():
    cluster = Cluster((2, 2))
    expected = ["{w1d1},{w0d0}", "{w1d0},{w0d1}"]
    assert _laid_out(cluster, [1, 1], layout={"specific": [[[3], [0]], [[2], [1]]]}) == expected
    assert _laid_out(cluster, [1, 1], layout={"specific": [[["w1d1"], [0]], [["w1d0"], ["w0d1"]]]}) == expected


def test_a_specific_layout_may_leave_devices_out():
    assert _laid_out(Cluster((4,)), [2], layout={"specific": [[[1, 3]]]}) == ["{w0d1,w0d3}"]


def test_a_specific_layout_repeats_devices_between_taskgraphs_only_if_they_are_colocated():
    layout = {"specific": [[[0, 1]], [[1, 0]]]}
    assert _laid_out(Cluster((2,)), [2, 2], layout=layout, colocate=True) == ["{w0d0,w0d1}", "{w0d1,w0d0}"]
    with pytest.raises(ClusterError, match="device w0d0 is used 2 times"):
        Cluster((2,)).virtual_devices([2, 2], layout=layout)
    with pytest.raises(ClusterError, match="device w0d0 is used 2 times"):
        Cluster((2,)).virtual_devices([2], layout={"specific": [[[0, "w0d0"]]]}, colocate=True)


@pytest.mark.parametrize(
    ("counts", "rows", "expected"),
    [
        ([1], [[[4]]], "there is no device 4"),
        ([1], [[["w2d0"]]], "there is no device w2d0"),
        ([1], [[[True]]], "there is no device True"),
        ([1, 1], [[[0]]], "it has 1 TaskGraphs, but the model has 2"),
        ([1, 1], [[[0], [1]], [[2]]], r"TaskGraphs have \[2, 1\] replicas"),
        ([1], [[]], r"TaskGraphs have \[0\] replicas"),
        ([2, 1], [[[0]], [[1]]], r"TaskGraph 0 needs 2 devices in each replica, got \[1\]"),
    ],
)
def test_a_specific_layout_that_does_not_fit_is_refused(counts: list[int], rows: list, expected: str):
    with pytest.raises(ClusterError, match=f"(?s)does not fit the cluster 2x2:.*{expected}"):
        Cluster((2, 2)).virtual_devices(counts, layout={"specific": rows})


def test_all_findings_about_a_specific_layout_come_in_one_message():
    with pytest.raises(ClusterError) as caught:
        Cluster((2,)).virtual_devices([1, 2], layout={"specific": [[[0]], [[0], [7]]]})
    assert str(caught.value).count("\n  - ") == 4


@pytest.mark.parametrize("rows", [3, [0, 1], [[0, 1]], "w0d0", [["w0d0"]], None])
def test_a_specific_layout_of_another_depth_is_refused(rows: object):
    with pytest.raises(ClusterError, match=r"a specific layout is such as \[\[\[0, 1\]\]"):
        Cluster((2,)).virtual_devices([1], layout={"specific": rows})


def test_aware_row_puts_workers_of_one_machine_side_by_side_rank_0s_first():
    hosts = ("10.0.0.2:1", "10.0.0.1:1", "10.0.0.2:2", "10.0.0.1:2")
    cluster = Cluster((1, 1, 1, 1), hosts=hosts)
    assert _laid_out(cluster, [1, 1], layout={"aware_row": 2}) == ["{w0d0},{w2d0}", "{w1d0},{w3d0}"]
    assert _laid_out(cluster, [2, 2], layout={"aware_row": 2}) == ["{w0d0,w2d0}", "{w1d0,w3d0}"]
    assert _laid_out(cluster, [4], layout={"aware_row": 4}) == ["{w0d0,w2d0,w1d0,w3d0}"]


def test_aware_row_takes_workers_of_several_devices_in_either_order():
    cluster = Cluster((2, 2, 2, 2), hosts=("a:1", "b:1", "a:2", "b:2"))
    layout = {"aware_row": 2}
    assert _laid_out(cluster, [2, 2], layout=layout) == ["{w0d0,w0d1},{w2d0,w2d1}", "{w1d0,w1d1},{w3d0,w3d1}"]
    expected = ["{w0d0,w2d0},{w0d1,w2d1}", "{w1d0,w3d0},{w1d1,w3d1}"]
    assert _laid_out(cluster, [2, 2], layout=layout, prefer_intra_node=False) == expected


def test_aware_row_reads_addresses_with_colons():
    layout = {"aware_row": 2}
    full = ("[::1]:80", "[::2]:80", "[::1]:81", "[::2]:81")
    assert _laid_out(Cluster((1,) * 4, hosts=full), [2, 2], layout=layout) == ["{w0d0,w2d0}", "{w1d0,w3d0}"]
    bare = ("fe80::1", "fe80::2", "fe80::1", "fe80::2")
    assert _laid_out(Cluster((1,) * 4, hosts=bare), [2, 2], layout=layout) == ["{w0d0,w2d0}", "{w1d0,w3d0}"]


@pytest.mark.parametrize(
    ("hosts", "counts", "layout", "expected"),
    [
        ("aaab", [1, 1], {"aware_row": 2}, "same number of workers on each machine, got a: 3, b: 1"),
        ("aabb", [1, 1], {"aware_row": 3}, "3 workers for each of 2 TaskGraphs do not make the 4 workers"),
        ("aabb", [1, 1], {"aware_row": 1}, "1 workers for each of 2 TaskGraphs do not make the 4 workers"),
        ("aabb", [1, 1], {"aware_row": 0}, "0 workers for each"),
        ("aabb", [1, 1], {"aware_row": "2"}, "'2' workers for each"),
        (
            "aabb",
            [1, 3],
            {"aware_row": 2},
            "2 devices are not divisible by 3, the devices of one replica of TaskGraph 1",
        ),
        ("aabb", [1, 2], {"aware_row": 2}, r"TaskGraphs have \[2, 1\] replicas"),
    ],
)
def test_aware_row_refuses_what_does_not_divide(hosts: str, counts: list[int], layout: dict, expected: str):
    with pytest.raises(ClusterError, match=expected):
        Cluster((1,) * 4, hosts=tuple(hosts)).virtual_devices(counts, layout=layout)


def test_aware_row_and_colocation_contradict_each_other():
    with pytest.raises(ClusterError, match="aware_row gives each TaskGraph its own workers; colocate shares them"):
        Cluster((1, 1)).virtual_devices([1, 1], layout={"aware_row": 1}, colocate=True)


@pytest.mark.parametrize(
    ("layout", "nearest"),
    [
        ("Auto", "the nearest is auto"),
        ("aware_rows", "the nearest is aware_row"),
        ({"specifc": []}, "the nearest is specific"),
        ("specific", "write one of 'auto'"),
        ({"auto": True}, "write one of 'auto'"),
        ({"specific": [[[0]]], "aware_row": 1}, "write one of 'auto'"),
        ({}, "write one of 'auto'"),
    ],
)
def test_a_layout_that_does_not_exist_is_refused(layout: str | dict, nearest: str):
    with pytest.raises(ClusterError, match=f"is not supported.*{nearest}"):
        Cluster().virtual_devices([1], layout=layout)
