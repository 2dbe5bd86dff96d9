"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [2, 2] = input
#   gain: [2] = input
#   v: [2, 2] = input
#   all_reduce: [2, 2] = all_reduce(v, 0, [0, 1])
#   add_rms_norm2 = add_rms_norm2(all_reduce, x, gain, 1e-06)
#   getitem: [2, 2] = add_rms_norm2[0]
#   return getitem

PASS = 'tests.mutants.sequence_parallel:ResidualNotSliced'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
}
KIND = 'rewritten-raises'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}},{"name":"v","shape":[2,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"'
    'recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"gain","op":'
    '"placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"'
    'name":"v","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"floa'
    't32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args"'
    ':[{"node":"v"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[2,2],"stride":[2,1],'
    '"dtype":"float32","alias":3}},{"name":"add_rms_norm2","op":"call_function","target":"tensor_cast::ad'
    'd_rms_norm2","args":[{"node":"all_reduce"},{"node":"x"},{"node":"gain"},1e-06],"val":{"tuple":[{"sha'
    'pe":[2,2],"stride":[2,1],"dtype":"float32","alias":4},{"shape":[2,2],"stride":[2,1],"dtype":"float32'
    '","alias":5}]}},{"name":"getitem","op":"call_function","target":"python::getitem","args":[{"node":"a'
    'dd_rms_norm2"},0],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":4}},{"name":"output"'
    ',"op":"output","target":"","args":[{"node":"getitem"}]}]}],"ranks":[{"graph":0,"constants":{"rank":0'
    ',"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=4","rank-red'
    'uced","two-groups","extra-outputs","attention","bias","carried-residual","fused-residual","layer_nor'
    'm","mask","mlp","over-dp","over-tp","reduced-read-later","region","rms_norm","scatter-gather","trans'
    'pose","unfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
