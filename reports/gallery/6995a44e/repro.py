"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [4, 4] = input
#   residual: [4, 4] = input
#   gain: [4] = input
#   all_reduce: [4, 4] = all_reduce(x, 0, [0, 1, 2, 3])
#   add_rms_norm: [4, 4] = add_rms_norm(all_reduce, residual, gain, 1e-06)
#   return (all_reduce, add_rms_norm)

PASS = "tests.mutants.sequence_parallel:ResidualNotSliced"
OPTIONS = {}
CONTRACT = {"idempotent": True, "metadata": True, "identity": False}
KIND = "rewritten-raises"
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":4,"dims":[{"name":"tp","groups":[[0,1,'
    '2,3]]}]},"inputs":[{"name":"x","shape":[4,4],"dtype":"float32","placements":[],"recipe":{"kind":"uni'
    'form","scale":1.0}},{"name":"residual","shape":[4,4],"dtype":"float32","placements":[],"recipe":{"ki'
    'nd":"uniform","scale":1.0}},{"name":"gain","shape":[4],"dtype":"float32","placements":[],"recipe":{"'
    'kind":"norm_weight","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","a'
    'rgs":[],"val":{"shape":[4,4],"stride":[4,1],"dtype":"float32","alias":0}},{"name":"residual","op":"p'
    'laceholder","target":"","args":[],"val":{"shape":[4,4],"stride":[4,1],"dtype":"float32","alias":1}},'
    '{"name":"gain","op":"placeholder","target":"","args":[],"val":{"shape":[4],"stride":[1],"dtype":"flo'
    'at32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args'
    '":[{"node":"x"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[4,4],"stride":[4,1]'
    ',"dtype":"float32","alias":3}},{"name":"add_rms_norm","op":"call_function","target":"tensor_cast::ad'
    'd_rms_norm","args":[{"node":"all_reduce"},{"node":"residual"},{"node":"gain"},1e-06],"val":{"shape":'
    '[4,4],"stride":[4,1],"dtype":"float32","alias":4}},{"name":"output","op":"output","target":"","args"'
    ':[{"tuple":[{"node":"all_reduce"},{"node":"add_rms_norm"}]}]}]}],"ranks":[{"graph":0,"constants":{"r'
    'ank":0,"tp":[0,1,2,3]}},{"graph":0,"constants":{"rank":1,"tp":[0,1,2,3]}},{"graph":0,"constants":{"r'
    'ank":2,"tp":[0,1,2,3]}},{"graph":0,"constants":{"rank":3,"tp":[0,1,2,3]}}],"seed":0,"labels":["layer'
    's=1","rank-reduced","extra-outputs","fused-residual","over-tp"]}'
)

if __name__ == "__main__":
    raise SystemExit(reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT))
