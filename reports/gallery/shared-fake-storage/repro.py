"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [2, 2] = input
#   all_reduce: [2, 2] = all_reduce(v, 0, [0, 1])
#   rms_norm: [2, 2] = rms_norm(all_reduce, gain, 1e-06)
#   all_reduce_1: [2, 2] = all_reduce(v, 0, [0, 1])
#   rms_norm_1: [2, 2] = rms_norm(all_reduce_1, gain, 1e-06)
#   return (rms_norm, rms_norm_1)

PASS = 'tests.mutants.sequence_parallel:ScattersShareStorage'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
}
KIND = 'stale-metadata'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[2,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"r'
    'ecipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","targe'
    't":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"plac'
    'eholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"n'
    'ame":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"v"},{"ran'
    'k_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","a'
    'lias":2}},{"name":"rms_norm","op":"call_function","target":"tensor_cast::rms_norm","args":[{"node":"'
    'all_reduce"},{"node":"gain"},1e-06],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":3}'
    '},{"name":"all_reduce_1","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"v"'
    '},{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"floa'
    't32","alias":4}},{"name":"rms_norm_1","op":"call_function","target":"tensor_cast::rms_norm","args":['
    '{"node":"all_reduce_1"},{"node":"gain"},1e-06],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32"'
    ',"alias":5}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"rms_norm"},{"node'
    '":"rms_norm_1"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0,1],"tp":[0,1]}},{"graph":0,'
    '"constants":{"rank":1,"dp":[0,1],"tp":[0,1]}}],"seed":0,"labels":["layers=3","bsh","two-groups","reo'
    'rdered","extra-outputs","attention","carried-residual","entry-norm","fused-reduce","fused-residual",'
    '"mask","mlp","over-dp","over-tp","reduced-read-later","region","rms_norm","unfused-residual","view"]'
    '}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
