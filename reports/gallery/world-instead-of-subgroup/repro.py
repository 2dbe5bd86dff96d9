"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   wdown: [2, 2] = input
#   v: [1, 2] = input
#   mm: [1, 2] = mm(v, wdown)
#   all_reduce: [1, 2] = all_reduce(mm, 0, [0, 1])
#   return all_reduce

PASS = 'tests.mutants.foreign:FusedOverWorld'
OPTIONS = {'world_size': 4}
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
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":4,"dims":[{"name":"dp","groups":[[0,1]'
    ',[2,3]]}]},"inputs":[{"name":"wdown","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind'
    '":"uniform","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kin'
    'd":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"wdown","op":"placeholder","target":"","args'
    '":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder'
    '","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"m'
    'm","op":"call_function","target":"aten::mm","args":[{"node":"v"},{"node":"wdown"}],"val":{"shape":[1'
    ',2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"all_reduce","op":"call_function","target":'
    '"tensor_cast::all_reduce","args":[{"node":"mm"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"va'
    'l":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"output","op":"output","targe'
    't":"","args":[{"node":"all_reduce"}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0,1]}},{"gr'
    'aph":0,"constants":{"rank":1,"dp":[0,1]}},{"graph":0,"constants":{"rank":2,"dp":[2,3]}},{"graph":0,"'
    'constants":{"rank":3,"dp":[2,3]}}],"seed":0,"labels":["layers=3","bsh","two-groups","extra-outputs",'
    '"attention","carried-residual","entry-norm","fused-reduce","fused-residual","layer_norm","mlp","over'
    '-dp","over-tp","region","rms_norm","scatter-gather","unfused-residual","view","degenerate"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
