"""What nvidia-smi, the kernel's log and /sys say on machines with GPUs, as others recorded it."""

# nvidia-smi -q -x of an L4 with driver 555.42.06, July 2024, found in a public repository:
# without the elements that nobody reads here.
L4 = """<gpu id="00000000:01:00.0">
    <product_name>NVIDIA L4</product_name>
    <mig_mode><current_mig>N/A</current_mig><pending_mig>N/A</pending_mig></mig_mode>
    <mig_devices>
\t\t\tNone
    </mig_devices>
    <uuid>GPU-c5533cd4-5a60-059e-348d-b6d7466932e4</uuid>
    <gpu_reset_status>
        <reset_required>No</reset_required>
        <drain_and_reset_recommended>N/A</drain_and_reset_recommended>
    </gpu_reset_status>
    <performance_state>P0</performance_state>
    <clocks_event_reasons>
        <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
        <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
        <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
        <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
        <clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
        <clocks_event_reason_sync_boost>Not Active</clocks_event_reason_sync_boost>
        <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors>
        <volatile>
            <sram_correctable>0</sram_correctable>
            <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
            <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
            <dram_correctable>0</dram_correctable>
            <dram_uncorrectable>0</dram_uncorrectable>
        </volatile>
        <aggregate>
            <sram_correctable>0</sram_correctable>
            <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
            <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
            <dram_correctable>0</dram_correctable>
            <dram_uncorrectable>0</dram_uncorrectable>
            <sram_threshold_exceeded>No</sram_threshold_exceeded>
        </aggregate>
    </ecc_errors>
    <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
    <remapped_rows>
        <remapped_row_unc>0</remapped_row_unc>
        <remapped_row_pending>No</remapped_row_pending>
        <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <temperature><gpu_temp>45 C</gpu_temp><memory_temp>N/A</memory_temp></temperature>
    <clocks><sm_clock>2040 MHz</sm_clock><mem_clock>6250 MHz</mem_clock></clocks>
    <max_clocks><sm_clock>2040 MHz</sm_clock><mem_clock>6251 MHz</mem_clock></max_clocks>
</gpu>"""

# The same of a GeForce GTX 1070 with driver 418.56, October 2019, which has no ECC.
GTX_1070 = """<gpu id="00000000:01:00.0">
    <product_name>GeForce GTX 1070</product_name>
    <uuid>GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeffffff</uuid>
    <clocks_throttle_reasons>
        <clocks_throttle_reason_gpu_idle>Active</clocks_throttle_reason_gpu_idle>
        <clocks_throttle_reason_sw_power_cap>Not Active</clocks_throttle_reason_sw_power_cap>
        <clocks_throttle_reason_hw_slowdown>Not Active</clocks_throttle_reason_hw_slowdown>
        <clocks_throttle_reason_sw_thermal_slowdown>Not Active</clocks_throttle_reason_sw_thermal_slowdown>
    </clocks_throttle_reasons>
    <ecc_mode><current_ecc>N/A</current_ecc><pending_ecc>N/A</pending_ecc></ecc_mode>
    <ecc_errors>
        <volatile>
            <single_bit><device_memory>N/A</device_memory><total>N/A</total></single_bit>
            <double_bit><device_memory>N/A</device_memory><total>N/A</total></double_bit>
        </volatile>
        <aggregate>
            <single_bit><device_memory>N/A</device_memory><total>N/A</total></single_bit>
            <double_bit><device_memory>N/A</device_memory><total>N/A</total></double_bit>
        </aggregate>
    </ecc_errors>
    <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
    <temperature><gpu_temp>49 C</gpu_temp></temperature>
    <clocks><sm_clock>480 MHz</sm_clock></clocks>
    <max_clocks><sm_clock>1999 MHz</sm_clock></max_clocks>
</gpu>"""

# A GPU that is divided by MIG, driver 535.129.03, October 2024: most values are missing.
MIG = """<gpu id="00000000:10:00.0">
    <mig_mode><current_mig>Enabled</current_mig><pending_mig>Enabled</pending_mig></mig_mode>
    <mig_devices>
        <mig_device><index>0</index><gpu_instance_id>1</gpu_instance_id></mig_device>
        <mig_device><index>1</index><gpu_instance_id>5</gpu_instance_id></mig_device>
    </mig_devices>
    <uuid>GPU-feba7e40-d724-01ff-b00f-3a439a28a6c7</uuid>
    <ecc_errors>N/A</ecc_errors>
    <remapped_rows>N/A</remapped_rows>
    <temperature><gpu_temp>N/A</gpu_temp></temperature>
</gpu>"""


def answer(*gpus):
    """Return the output of nvidia-smi -q -x for these GPUs."""
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
    return f"{head}<nvidia_smi_log>\n{''.join(gpus)}\n</nvidia_smi_log>\n"


# What nvidia-smi prints instead, and its exit code (anderskm/gputil#55, JosephKJ/OWOD#81)
MISMATCH = (
    18,
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161",
)

# Lines of the kernel's log: NVIDIA/NVSentinel#155, stas00/ml-engineering, NVIDIA's page on Xids,
# tests of GPU monitors; the times are ours
XID_79 = "[ 1843.308145] NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"
XID_63 = (
    "[ 1001.000000] NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, "
    "Row Remapper: New row marked for remapping, reset gpu to activate."
)
XID_95 = (
    "[16450076.435595] NVRM: Xid (PCI:0000:01:00): 95, pid=7062, "
    "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No"
)
XID_94 = (  # of a MIG device
    "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, "
    "Contained: CE User Channel (0x9). RST: No, D-RST: No"
)
XID_31 = "NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000"
XID_14 = "[  966.503025] NVRM: Xid (0000:03:00): 14, Channel 00000001"
OTHER_LINES = """[    0.000000] Linux version 6.8.0-106-generic
[ 1843.439662] NVRM: The NVIDIA probe routine failed for 1 device(s).
[ 1843.500000] NVRM: GPU at PCI:0000:0b:00: GPU-aeab3757-56a6-7e30-3f7c-1f322454bde2"""
NOT_ALLOWED = "dmesg: read kernel buffer failed: Operation not permitted"
