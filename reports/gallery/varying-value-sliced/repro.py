"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2, 2] = input
#   gain: [2] = input
#   all_reduce: [1, 2, 2] = all_reduce(x, 0, [0, 1])
#   add_rms_norm: [1, 2, 2] = add_rms_norm(all_reduce, x, gain, 1e-06)
#   return add_rms_norm

PASS = 'tests.mutants.sequence_parallel:VaryingAddendSliced'
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
    ']}]},"inputs":[{"name":"x","shape":[2,2,2],"dtype":"float32","placements":[["tp","shard(0)"]],"recip'
    'e":{"kind":"uniform","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"rec'
    'ipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":""'
    ',"args":[],"val":{"shape":[1,2,2],"stride":[4,2,1],"dtype":"float32","alias":0}},{"name":"gain","op"'
    ':"placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{'
    '"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},{"r'
    'ank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2,2],"stride":[4,2,1],"dtype":"float'
    '32","alias":2}},{"name":"add_rms_norm","op":"call_function","target":"tensor_cast::add_rms_norm","ar'
    'gs":[{"node":"all_reduce"},{"node":"x"},{"node":"gain"},1e-06],"val":{"shape":[1,2,2],"stride":[4,2,'
    '1],"dtype":"float32","alias":3}},{"name":"output","op":"output","target":"","args":[{"node":"add_rms'
    '_norm"}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1'
    ',"tp":[0,1]}}],"seed":0,"labels":["layers=2","bsh","two-groups","reordered","extra-outputs","near-mi'
    'ss","tokens-as-ranks","attention","bias","entry-norm","fused-residual","in-place","layer_norm","mlp"'
    ',"over-dp","over-tp","reduced-read-later","region","rms_norm","scatter-gather","user-gather","view"]'
    '}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
