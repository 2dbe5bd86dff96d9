"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   wdown: [1, 2] = input
#   bias: [2] = input
#   v: [1, 1] = input
#   mm: [1, 2] = mm(v, wdown)
#   all_reduce: [1, 2] = all_reduce(mm, 0, [0, 1])
#   add: [1, 2] = add.Tensor(all_reduce, bias)
#   return add

PASS = 'tests.mutants.foreign:BiasOnEveryRank'
OPTIONS = {}
CONTRACT = {
    'idempotent': False,
    'metadata': True,
    'identity': False,
    'schedule': False,
    'overlap': False,
    'boundary': 'strict',
    'inputs': 'ready',
}
KIND = 'wrong-value'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"wdown","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uni'
    'form","scale":1.0}},{"name":"bias","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"u'
    'niform","scale":1.0}},{"name":"v","shape":[1,1],"dtype":"float32","placements":[],"recipe":{"kind":"'
    'uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"wdown","op":"placeholder","target":"","args":[]'
    ',"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"bias","op":"placeholder"'
    ',"target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"name":"v","op'
    '":"placeholder","target":"","args":[],"val":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":'
    '2}},{"name":"mm","op":"call_function","target":"aten::mm","args":[{"node":"v"},{"node":"wdown"}],"va'
    'l":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"all_reduce","op":"call_funct'
    'ion","target":"tensor_cast::all_reduce","args":[{"node":"mm"},{"rank_constant":"rank"},{"rank_consta'
    'nt":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4}},{"name":"add","op":"cal'
    'l_function","target":"aten::add.Tensor","args":[{"node":"all_reduce"},{"node":"bias"}],"val":{"shape'
    '":[1,2],"stride":[2,1],"dtype":"float32","alias":5}},{"name":"output","op":"output","target":"","arg'
    's":[{"node":"add"}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants'
    '":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=2","bsh","reordered","extra-outputs","attention'
    '","bias","fused-reduce","fused-residual","mask","mlp","over-tp","reduced-read-later","region","rms_n'
    'orm","uneven-features","unfused-residual","view","degenerate","timed"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
