"""Real code on the threaded process group, with the completion of collectives chosen."""

import json
import subprocess
import sys
import textwrap

import pytest

from tcverify.errors import UsageError
from tcverify.pytorch.adversary import Completion

_SCRIPT = """
import json, threading, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from tcverify.pytorch.adversary import Completion

import torch._dynamo  # by one thread: threads that import it at once wait for each other

c = torch.ops._c10d_functional
WORLD = 2

def waits(x):
    y = c.all_reduce(x, "sum", "0")
    return c.wait_tensor(y) + x

def reads_too_early(x):
    y = c.all_reduce(x, "sum", "0")
    early = y * 1
    return c.wait_tensor(y) * 0 + early

def writes_operand(x):
    x = x.clone()
    y = c.all_gather_into_tensor(x, WORLD, "0")
    x.add_(100)
    return c.wait_tensor(y)

def in_place(x):
    x = x.clone()
    y = c.all_reduce_(x, "sum", "0")
    return c.wait_tensor(y) * 2

def crossed(x):
    a, b = c.all_reduce(x, "sum", "0"), c.all_gather_into_tensor(x, WORLD, "0")
    gathered = c.wait_tensor(b)
    return torch.cat([gathered, c.wait_tensor(a)])

def unwaited(x):
    c.all_reduce(x, "sum", "0")
    return x + 1

def run(rank, case, when, results):
    dist.init_process_group(backend="threaded", rank=rank, world_size=WORLD, store=STORE)
    x = torch.arange(4.0) + rank
    with torch.no_grad():
        with Completion(when):
            results[rank] = globals()[case](x).tolist()

STORE = dist.HashStore()
found = {}
world = threaded._install_threaded_pg()
torch._C._distributed_c10d._set_thread_isolation_mode(True)
for case in ("waits", "reads_too_early", "writes_operand", "in_place", "crossed", "unwaited"):
    for when in ("early", "late", "apart"):
        threaded.ProcessLocalGroup.reset()
        STORE = dist.HashStore()
        results = [None] * WORLD
        ranks = [threading.Thread(target=run, args=(r, case, when, results)) for r in range(WORLD)]
        [one.start() for one in ranks]
        [one.join(60) for one in ranks]
        found[case + " " + when] = results
print(json.dumps(found).replace("NaN", '"nan"'))
"""


@pytest.fixture(scope="module")
def threads():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_SCRIPT)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("when", ["early", "late", "apart"])
def test_sound_code_gives_the_same_at_any_time(threads, when):
    for rank in (0, 1):
        x = [float(i + rank) for i in range(4)]
        total = [2.0 * i + 1 for i in range(4)]
        gathered = [float(i) for i in range(4)] + [float(i + 1) for i in range(4)]
        assert threads[f"waits {when}"][rank] == [a + b for a, b in zip(total, x, strict=True)]
        assert threads[f"in_place {when}"][rank] == [2 * a for a in total]
        assert threads[f"crossed {when}"][rank] == gathered + total
        assert threads[f"unwaited {when}"][rank] == [a + 1 for a in x]


def test_a_read_before_the_wait_shows_unless_the_collective_is_early(threads):
    assert threads["reads_too_early early"][0] == [1.0, 3.0, 5.0, 7.0]
    assert threads["reads_too_early late"][0] == ["nan"] * 4
    assert threads["reads_too_early apart"][0] == ["nan"] * 4


def test_a_write_to_the_operand_before_the_wait_shows_if_it_is_read_late(threads):
    gathered = [float(i) for i in range(4)] + [float(i + 1) for i in range(4)]
    assert threads["writes_operand early"][1] == threads["writes_operand apart"][1] == gathered
    assert threads["writes_operand late"][1] == [100 + a for a in gathered]


def test_other_choices_are_refused():
    with pytest.raises(UsageError, match="sometimes"):
        Completion("sometimes")
