//! What a process may take: memory of its machine, within its control group, and address space (`ulimit`).

use std::path::Path;

/// Limits of this process's control group, version 2 or 1.
#[derive(Clone, Copy, Debug)]
pub struct ControlGroup {
    /// Memory that it may use, in bytes; `None`: no limit.
    pub memory_bytes: Option<u64>,
    /// CPUs that it may use, whole or in part; `None`: no quota.
    pub cpus: Option<f64>,
    used_bytes: u64, // pages of files apart
}

impl ControlGroup {
    /// Read with `text`, which gives the trimmed text of a file below `/`, or nothing.
    ///
    /// In a container the group's own directory is usually mounted as the root of the hierarchy; elsewhere
    /// /proc/self/cgroup names it. Limits of every level up to the root apply.
    pub fn read(text: &impl Fn(&str) -> String) -> Self {
        let own = text("proc/self/cgroup");
        let path = |controller: &str| {
            let line = own.lines().find(|l| l.split(':').nth(1).is_some_and(|c| c.split(',').any(|c| c == controller)));
            line.and_then(|l| l.splitn(3, ':').nth(2)).unwrap_or("/").trim_matches('/').to_string()
        };
        let levels = |base: &str, controller: &str| {
            let mut dirs = vec![base.to_string()];
            for part in path(controller).split('/').filter(|p| !p.is_empty()) {
                dirs.push(format!("{}/{part}", dirs[dirs.len() - 1]));
            }
            dirs
        };
        // Version 1 writes "no limit" as a huge number.
        let bytes = |file: String| text(&file).parse::<u64>().ok().filter(|&b| b < 1 << 60);
        let mut memory: Option<(u64, u64)> = None;
        let mut quota: Option<f64> = None;
        let mut tighten = |cpus: f64| quota = Some(quota.map_or(cpus, |q| q.min(cpus)));
        let mut groups: Vec<(Option<u64>, u64)> = Vec::new();
        // Pages of files count as used there, and can be had again: a mapped cache must not look like memory that is
        // gone.
        let files = |dir: &str| {
            let stat = text(&format!("{dir}/memory.stat"));
            let of = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
            let either = |v2, v1| of(v1).or_else(|| of(v2)).unwrap_or(0);
            either("active_file ", "total_active_file ") + either("inactive_file ", "total_inactive_file ")
        };
        for dir in levels("sys/fs/cgroup", "") {
            let used = bytes(format!("{dir}/memory.current")).unwrap_or(0);
            groups.push((bytes(format!("{dir}/memory.max")), used.saturating_sub(files(&dir))));
            let max = text(&format!("{dir}/cpu.max"));
            if let Some((Ok(limit), Ok(period))) =
                max.split_once(' ').map(|(l, p)| (l.parse::<f64>(), p.parse::<f64>()))
            {
                tighten(limit / period);
            }
        }
        for dir in levels("sys/fs/cgroup/memory", "memory") {
            let used = bytes(format!("{dir}/memory.usage_in_bytes")).unwrap_or(0);
            groups.push((bytes(format!("{dir}/memory.limit_in_bytes")), used.saturating_sub(files(&dir))));
        }
        for dir in levels("sys/fs/cgroup/cpu", "cpu") {
            let value = |name: &str| text(&format!("{dir}/{name}")).parse::<f64>().ok().filter(|&v| v > 0.0);
            if let (Some(limit), Some(period)) = (value("cpu.cfs_quota_us"), value("cpu.cfs_period_us")) {
                tighten(limit / period);
            }
        }
        for (limit, used) in groups {
            if let Some(limit) =
                limit.filter(|&l| memory.is_none_or(|(m, u)| l.saturating_sub(used) < m.saturating_sub(u)))
            {
                memory = Some((limit, used));
            }
        }
        Self { memory_bytes: memory.map(|m| m.0), used_bytes: memory.map_or(0, |m| m.1), cpus: quota }
    }

    /// What the machine has, within the group's limit. `meminfo`: the text of `/proc/meminfo`.
    pub fn available_bytes(&self, meminfo: &str) -> u64 {
        let machine = meminfo_bytes(meminfo, "MemAvailable").or(meminfo_bytes(meminfo, "MemFree")).unwrap_or(0);
        self.memory_bytes.map_or(machine, |limit| machine.min(limit.saturating_sub(self.used_bytes)))
    }
}

/// RAM that this process can take right now, within its control group's limit.
pub fn available_bytes() -> u64 {
    let text = |path: &str| std::fs::read_to_string(Path::new("/").join(path)).unwrap_or_default().trim().to_string();
    ControlGroup::read(&text).available_bytes(&text("proc/meminfo"))
}

/// `MemTotal:  123 kB`, with `Node 0 ` in front in a node's file: the bytes of one line.
pub fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line =
        meminfo.lines().find(|l| l.split(':').next().is_some_and(|key| key.split_whitespace().last() == Some(name)))?;
    line.split_once(':')?.1.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Address space that this process may still take (`ulimit -v`); `None` without a limit.
pub fn address_space_bytes() -> Option<u64> {
    let text = |path| std::fs::read_to_string(path).unwrap_or_default();
    left(&text("/proc/self/limits"), &text("/proc/self/status"))
}

fn left(limits: &str, status: &str) -> Option<u64> {
    let limit: u64 = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max address space"))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()?;
    let used_kib: u64 =
        status.lines().find_map(|line| line.strip_prefix("VmSize:"))?.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(limit.saturating_sub(used_kib * 1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_counts_against_the_limit() {
        let status = "VmPeak:\t  900 kB\nVmSize:\t  100 kB\n";
        assert_eq!(
            left("Max address space         204800               unlimited            bytes     \n", status),
            Some(102_400)
        );
        assert_eq!(
            left("Max address space         1024                 unlimited            bytes     \n", status),
            Some(0)
        );
        assert_eq!(
            left("Max address space         unlimited            unlimited            bytes     \n", status),
            None
        );
        assert_eq!(left("", ""), None);
    }
}
