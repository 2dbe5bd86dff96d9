"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 1 runs it:
#
#   partial: [2, 2] = input
#   gain: [2] = input
#   all_reduce: [2, 2] = all_reduce(partial, 1, [0, 1])
#   rms_norm: [2, 2] = rms_norm(all_reduce, gain, 1e-06)
#   return rms_norm

PASS = 'tests.mutants.sequence_parallel:GatherSkippedOnFirstRank'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
}
KIND = 'deadlock'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"partial","shape":[2,2],"dtype":"float32","placements":[["tp","partial(sum)"]'
    '],"recipe":{"kind":"uniform","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements"'
    ':[],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"partial","op":"placeholde'
    'r","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"'
    'gain","op":"placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","al'
    'ias":1}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node'
    '":"partial"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[2,2],"stride":[2,1],"d'
    'type":"float32","alias":2}},{"name":"rms_norm","op":"call_function","target":"tensor_cast::rms_norm"'
    ',"args":[{"node":"all_reduce"},{"node":"gain"},1e-06],"val":{"shape":[2,2],"stride":[2,1],"dtype":"f'
    'loat32","alias":3}},{"name":"output","op":"output","target":"","args":[{"node":"rms_norm"}]}]}],"ran'
    'ks":[{"graph":0,"constants":{"rank":0,"dp":[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[0,1]}}],"s'
    'eed":0,"labels":["layers=2","flat","two-groups","reordered","few-tokens","extra-outputs","attention"'
    ',"carried-residual","fused-residual","mask","mlp","over-dp","over-tp","region","rms_norm","transpose'
    '","unfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
