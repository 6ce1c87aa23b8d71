//! The examples at the end of each `--help`.

pub const BENCH: &str = "\
Examples:
  haul bench                       every experiment in two minutes, and a summary
  haul bench --for 5m              the same, with narrower intervals
  haul bench send                  one experiment, with its table
  haul bench --listen              on the other of two machines
  haul bench --to storage7         between this machine and that one

See docs/guide.md for what each figure means.";

pub const SEND: &str = "\
Examples:
  haul bench send --paths read+write,sendfile --chunk 4KiB,64KiB,1MiB
  haul bench send --workload file:/srv/video.mp4 --json video.json
  haul bench send --workload memory:16MiB --to storage7
  haul bench send --rounds 30 --html - > page.html";

pub const RECEIVE: &str = "\
Examples:
  haul bench receive --paths read,mapped --mtu 1500,4148,9000
  haul bench receive --sent-by zerocopy --page-order single";

pub const FORWARD: &str = "\
Examples:
  haul bench forward --paths copy,splice --traffic bulk
  haul bench forward --traffic messages:64B,messages:4KiB
  haul bench forward --traffic tls,bulk --buffer 256KiB";

pub const PROFILE: &str = "\
Examples:
  haul bench profile --send sendfile --for 30s
  haul bench profile --html page.html -- rsync -a /srv/a/ /srv/b/
  haul bench profile -- sleep 10   what the machine does anyway";

pub const INTERRUPTS: &str = "\
Examples:
  haul bench interrupts
  haul bench interrupts --for 5m --json interrupts.json";

pub const SETTINGS: &str = "\
Examples:
  haul bench settings --settings congestion,mtu
  haul bench settings --congestion cubic --rate 4gbit";

pub const LOAN: &str = "\
Examples:
  haul bench loan --piece 4KiB,64KiB,1MiB";

pub const COPIES: &str = "\
Examples:
  haul bench copies --quick
  haul bench copies --quick --meter cycles
  haul bench copies --file 4MiB,256MiB --folios small,huge
  haul bench copies --in-flight 256KiB,4MiB,auto --for 10m";

pub const CHECKSUM: &str = "\
Examples:
  haul bench checksum --size 1KiB,1MiB";

pub const COMPARE: &str = "\
Examples:
  haul compare haul-report/2026-11-22T121033-web1 haul-report/latest
  haul compare old.json new.json --fail-above 15%
  haul compare iperf3-web1.json iperf3-web2.json
  haul compare ./haul-old ./haul-new --paths sendfile,splice --for 5m";

pub const PLAN: &str = "\
Examples:
  haul plan                        measure, test and write haul-plan.json
  haul plan --rate 100gbit         how many cores that takes, by each path
  haul plan --check                whether the plan was measured on this machine";

pub const SOAK: &str = "\
Examples:
  haul soak --for 30s              the load of this machine, interrupts included
  haul soak -- rsync -a a/ b/      the same while a command runs
  haul soak --runs 20 --bytes 1GiB -- ./send-1GiB
  haul soak --versus 'curl -so /dev/null http://host/b' -- curl -so /dev/null http://host/a
  haul soak --runs 50 --json base.json -- ./job
  haul soak --baseline base.json --fail-above 5% -- ./job";

pub const FLEET: &str = "\
Examples:
  srun --mpi=pmi2 haul fleet push model.bin /scratch/   to every node of a step of Slurm
  srun --mpi=pmi2 haul fleet bench                      every pair of nodes
  mpiexec.hydra -n 4 haul fleet hosts                   who the ranks are

See docs/fleet.md for Open MPI, torchrun, Ray and Kubernetes.";

pub const DOCTOR: &str = "\
Examples:
  haul doctor
  haul doctor --peer storage7 --json doctor.json";

pub const SERVE: &str = "\
Examples:
  haul serve /srv/www
  haul serve . --listen 127.0.0.1:8000 --listing --access-log -
  haul serve --config /etc/haul/serve.toml --check

See docs/serve.md for what it does, and for its limits.";

pub const PROXY: &str = "\
Examples:
  haul proxy --listen 5432 --to 10.0.0.5:5432,10.0.0.6:5432
  haul proxy --listen 443 --to unix:/run/app.sock --send-proxy v2 --access-log -
  haul proxy --config /etc/haul/proxy.toml --check
  haul proxy control /run/haul-proxy.sock connections

See docs/proxy.md for what it does, and for its limits.";

pub const PUSH: &str = "\
Examples:
  haul push photos backup.example.com:/srv/backup
  haul push -a site/ www@web1:/srv/www
  haul push -e 'ssh -p 2222' disk.img lab:images/
  haul push -aHAX --link-dest ../monday home/ vault:backup/tuesday
  haul push model.bin node1:/data/ node2:/data/ node3:/data/
  find . -name '*.conf' -print0 | haul push -a --files-from=- -0 . host:/etc/copy

See docs/transfer.md for what is copied, and for the limits.";

pub const PULL: &str = "\
Examples:
  haul pull db1:/var/backups/latest.tar.zst .
  haul pull -a web1:/srv/www/ www-copy

See docs/transfer.md for what is copied, and for the limits.";

pub const RUN: &str = "\
Examples:
  haul run --watch -- python3 -m http.server 8000
  haul run --watch -- nginx -c /etc/nginx/nginx.conf -g 'daemon off;'
  haul run -- apache2ctl -D FOREGROUND
  haul run --prove -- apache2ctl -D FOREGROUND
  haul run --watch --expect sendfile=90% --json report.json -- ./my-server";

pub const LAB: &str = "\
Examples:
  haul lab --receiver 'iperf3 -s' -- sh -c 'sleep 1; iperf3 -c $HAUL_PEER'
  haul lab --mtu 1500 --rate 1gbit --loss 0.1% -- ./my-test";

pub const COMPLETIONS: &str = "\
Examples:
  haul completions bash > /etc/bash_completion.d/haul
  haul completions fish > ~/.config/fish/completions/haul.fish";

pub const MAN: &str = "\
Examples:
  haul man /usr/local/share/man/man1";

pub const SCHEMA: &str = "\
Examples:
  haul schema                          # the names
  haul schema send > send.schema.json

docs/json.md has the same as tables of fields.";
