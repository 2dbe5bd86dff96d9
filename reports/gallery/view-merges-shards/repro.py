"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [2, 2, 2] = input
#   all_reduce: [2, 2, 2] = all_reduce(v, 0, [0, 1])
#   view: [4, 2] = view(all_reduce, [4, 2])
#   rms_norm: [4, 2] = rms_norm(view, gain, 1e-06)
#   return rms_norm

PASS = 'tests.mutants.sequence_parallel:ViewMergesTokens'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
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
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[2,2,2],"dtype":"float32","placements":[],"recipe":{"kind":"uni'
    'form","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","target":"","args":[],"va'
    'l":{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":"'
    '","args":[],"val":{"shape":[2,2,2],"stride":[4,2,1],"dtype":"float32","alias":1}},{"name":"all_reduc'
    'e","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"v"},{"rank_constant":"ra'
    'nk"},{"rank_constant":"tp"}],"val":{"shape":[2,2,2],"stride":[4,2,1],"dtype":"float32","alias":2}},{'
    '"name":"view","op":"call_function","target":"aten::view","args":[{"node":"all_reduce"},[4,2]],"val":'
    '{"shape":[4,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"rms_norm","op":"call_function",'
    '"target":"tensor_cast::rms_norm","args":[{"node":"view"},{"node":"gain"},1e-06],"val":{"shape":[4,2]'
    ',"stride":[2,1],"dtype":"float32","alias":3}},{"name":"output","op":"output","target":"","args":[{"n'
    'ode":"rms_norm"}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":'
    '{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=1","bsh","two-groups","reordered","extra-outputs"'
    ',"near-miss","attention","entry-norm","fused-residual","over-tp","region","rms_norm","unfused-residu'
    'al","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
