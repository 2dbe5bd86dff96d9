"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [2, 2] = input
#   gain: [2] = input
#   all_reduce: [2, 2] = all_reduce(x, 0, [1, 0])
#   rms_norm: [2, 2] = rms_norm(all_reduce, gain, 1e-06)
#   return rms_norm

PASS = 'tests.mutants.sequence_parallel:GatherOrderLost'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[1,0]'
    ']}]},"inputs":[{"name":"x","shape":[2,2],"dtype":"float32","placements":[["dp","partial(sum)"]],"rec'
    'ipe":{"kind":"uniform","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"r'
    'ecipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":'
    '"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"gain","op":"'
    'placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"n'
    'ame":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},{"ran'
    'k_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","a'
    'lias":2}},{"name":"rms_norm","op":"call_function","target":"tensor_cast::rms_norm","args":[{"node":"'
    'all_reduce"},{"node":"gain"},1e-06],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":3}'
    '},{"name":"output","op":"output","target":"","args":[{"node":"rms_norm"}]}]}],"ranks":[{"graph":0,"c'
    'onstants":{"rank":0,"dp":[1,0]}},{"graph":0,"constants":{"rank":1,"dp":[1,0]}}],"seed":0,"labels":["'
    'layers=3","rank-reduced","bf16","two-groups","reordered","extra-outputs","attention","bias","carried'
    '-residual","entry-norm","fused-residual","mlp","over-dp","reduced-read-later","region","rms_norm","s'
    'catter-gather","transpose","unfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
